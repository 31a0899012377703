"""What a run will take: memory, disk and hours, predicted from its config and the target's shape.

Nothing is loaded but configs and the tokenizer. The counts of parameters, stored bytes and
multiplications are exact or nearly so; two things are estimates and stated as such in the result:
how much of a device's matrix-product rate training reaches, and what the activations of a slot are.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3_core import DraftConfig, Eagle3Draft, default_aux_layer_ids
from eagle3_core.target import Target
from eagle3_train.build import draft_config
from eagle3_train.config import StrategyName, TrainConfig

# Dense bf16 rates of the data sheets, in FLOP/s.
DEVICES = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12}
_COUNTS = (1, 2, 4, 8)

# Estimates. Small products, attention, norms and the optimiser take the rest of the time.
_SHARE_OF_DATA_SHEET = 0.35
_SHARE_OF_MEASURED = 0.6
_MEASURE_SECONDS = 0.3
_RUNTIME_BYTES = 750 * 2**20  # Python with torch, transformers, datasets; measured on a CPU
_LOSS_CHUNK = 5 * 4 * 2**23  # five float32 buffers of the head loss, whose chunks have this size
_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3": 1}
_SCALE_BYTES = 4  # of one stored float8 state
_TOKEN_BYTES = 8 + 1 + 4 + 4  # id, mask, argmax, logz


@dataclass(frozen=True)
class Text:
    """How much there is to train on."""

    tokens: int
    supervised_fraction: float  # of the tokens
    mean_length: float  # tokens of a sample


def plan(
    config: TrainConfig,
    target: Target,
    text: Text,
    *,
    num_processes: int = 1,
    strategy: StrategyName = "ddp",
    device: str | None = None,
) -> dict[str, Any]:
    """The prediction, JSON-ready. Bytes are per process, FLOPs of the whole run.

    Args:
        config: of the run.
        target: `outline_target` is enough.
        text: read from the data, or assumed.
        num_processes: that share a step.
        strategy: how they share weights and optimiser.
        device: one of DEVICES; None = this machine, measured for a moment.

    Raises:
        UserError: a draft that contradicts itself or the target.
    """
    ids = config.capture.aux_layer_ids
    ids = tuple(default_aux_layer_ids(target.num_layers) if ids is None else sorted(ids))
    shape = draft_config(config.draft, target, ids, config.draft.vocab_size or target.vocab_size)
    with torch.device("meta"):
        draft = Eagle3Draft(shape)
    parameters = sum(p.numel() for p in draft.parameters())
    trained = parameters
    trained -= 0 if config.fit.train_embeddings else draft.embed_tokens.weight.numel()
    trained -= 0 if config.fit.train_head else draft.lm_head.weight.numel()
    flops = {
        "capture": _capture_flops(target, text),
        "fit": _fit_flops(config, shape, text) * config.fit.epochs,
    }
    rate, share = _rate(device, config.fit.dtype)
    memory = _memory(config, shape, text, parameters, trained, num_processes, strategy)
    start = 4 * (_parameters(target) + parameters)
    return {
        "target": target.name,
        "target_parameters": _parameters(target),
        "draft_parameters": parameters,
        "trained_parameters": trained,
        "tokens": text.tokens,
        "supervised_fraction": text.supervised_fraction,
        "num_steps": _num_steps(config, text),
        "num_processes": num_processes,
        "strategy": strategy,
        "memory_bytes": memory,
        "training_bytes": sum(memory.values()),
        "start_bytes": start,
        "peak_bytes": _RUNTIME_BYTES + max(start, sum(memory.values())),
        "disk_bytes": _disk(config, target, shape, text, parameters, trained),
        "flops": flops,
        "device": device or "this machine",
        "flops_per_s": rate,
        "share_reached": share,
        "hours": [
            {"num_processes": n, **{k: f / (rate * share * n) / 3600 for k, f in flops.items()}}
            for n in sorted({*_COUNTS, num_processes})
        ],
    }


def _memory(
    config: TrainConfig,
    shape: DraftConfig,
    text: Text,
    parameters: int,
    trained: int,
    num_processes: int,
    strategy: StrategyName,
) -> dict[str, int]:
    """Bytes of one process while it trains, by what they are."""
    fit = config.fit
    # At its peak a step has weights and gradients whole, beside the shards that outlast it.
    shards = 0 if strategy == "ddp" else trained / num_processes
    moments = 1 if strategy == "ddp" else num_processes
    own = min(fit.batch_tokens, text.tokens) / num_processes
    slots = min(fit.micro_batch_tokens, own)
    states = shape.aux_width + shape.target_hidden_size
    head = shape.draft_vocab_size * shape.hidden_size if fit.train_head else 0
    return {
        "weights": math.ceil(4 * (parameters + shards)),
        "gradients": 4 * trained,
        "optimiser": math.ceil(8 * trained / moments),
        "teacher_head": 4 * shape.draft_vocab_size * shape.target_hidden_size,
        "batch": math.ceil(own * 4 * states),
        "activations": math.ceil(4 * _activations(shape, fit.ttt_length, text, slots)),
        "loss": _LOSS_CHUNK + 4 * head,
    }


def _activations(shape: DraftConfig, steps: int, text: Text, slots: float) -> float:
    """Floats that a micro-batch keeps for its backward pass."""
    hidden, inter = shape.hidden_size, shape.intermediate_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    # A norm keeps its input, the normed rows and its output; attention its inputs and output.
    layer = 3 * queries + 2 * keys + 4 * inter + 3 * hidden
    seen = sum(8 * hidden if shape.sees_embedding(i) else 3 * hidden for i in _layers(shape))
    per_step = shape.num_hidden_layers * layer + seen
    per_slot = (1 if shape.aux_norm == "none" else 4) * shape.aux_width
    supervised = steps * text.supervised_fraction * slots
    return _slot_steps(steps, text, slots) * per_step + per_slot * slots + 5 * hidden * supervised


def _disk(
    config: TrainConfig,
    target: Target,
    shape: DraftConfig,
    text: Text,
    parameters: int,
    trained: int,
) -> dict[str, int]:
    """Bytes under OUT. Held-out states come on top."""
    checkpoints = 1 if config.fit.save_every is None else config.fit.keep
    disk = {"checkpoints": checkpoints * (4 * parameters + 8 * trained), "draft": 4 * parameters}
    if config.capture.mode == "online":
        return disk
    kind, states = config.capture.store_dtype, shape.num_aux_hidden_states + 1
    width = states * target.hidden_size * _STATE_BYTES[kind]
    scales = states * _SCALE_BYTES if kind == "float8_e4m3" else 0
    head = target.vocab_size * target.hidden_size * (4 if config.capture.dtype == "float32" else 2)
    return {"features": text.tokens * (width + scales + _TOKEN_BYTES) + head, **disk}


def _fit_flops(config: TrainConfig, shape: DraftConfig, text: Text) -> float:
    """Multiplications and additions of one epoch, backward passes included."""
    steps, slots = config.fit.ttt_length, float(text.tokens)
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    layers = 0.0
    for i in _layers(shape):
        width = shape.hidden_size * (2 if shape.sees_embedding(i) else 1)
        products = width * (queries + 2 * keys) + queries * shape.hidden_size
        products += 3 * shape.hidden_size * shape.intermediate_size
        layers += 2 * products + 4 * queries * text.mean_length / 2
    supervised = text.supervised_fraction * slots
    project = 2 * shape.aux_width * shape.hidden_size * slots if shape.has_fc else 0.0
    head = 2 * shape.draft_vocab_size * shape.hidden_size * supervised * steps
    teacher = 2 * shape.draft_vocab_size * shape.target_hidden_size * supervised
    body = 3 * (_slot_steps(steps, text, slots) * layers + project)
    return body + head * (3 if config.fit.train_head else 2) + teacher


def _capture_flops(target: Target, text: Text) -> float:
    """One forward pass; of experts all are counted, so a mixture takes less."""
    table = target.vocab_size * target.hidden_size
    tables = 1 if target.config.tie_word_embeddings else 2
    matrices = sum(p.numel() for p in target.model.parameters() if p.dim() > 1)
    return 2.0 * text.tokens * (matrices + (text.supervised_fraction - tables) * table)


def _slot_steps(steps: int, text: Text, slots: float) -> float:
    """All slots run at step 0, later those that are still supervised."""
    return slots * (1 + text.supervised_fraction * (steps - 1))


def _num_steps(config: TrainConfig, text: Text) -> int:
    steps = math.ceil(text.tokens / config.fit.batch_tokens) * config.fit.epochs
    return min(steps, config.fit.max_steps or steps)


def _rate(device: str | None, dtype: str) -> tuple[float, float]:
    """FLOP/s of matrix products, and the share of it that training is taken to reach."""
    if device is not None:
        return DEVICES[device], _SHARE_OF_DATA_SHEET
    place = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    size = 1024 if place.type == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=place, dtype=getattr(torch, dtype))
    _multiply(a, b)  # the first one sets things up
    began, done = time.monotonic(), 0
    while time.monotonic() - began < _MEASURE_SECONDS:
        _multiply(a, b)
        done += 1
    return done * 2 * size**3 / (time.monotonic() - began), _SHARE_OF_MEASURED


def _multiply(a: torch.Tensor, b: torch.Tensor) -> None:
    (a @ b)[0, 0].item()  # waits for the device


def _parameters(target: Target) -> int:
    return sum(p.numel() for p in target.model.parameters())


def _layers(shape: DraftConfig) -> range:
    return range(shape.num_hidden_layers)


def memory_rows(result: Mapping[str, Any]) -> Sequence[tuple[str, int]]:
    """What a table shows of the memory, the largest part first, the sums last."""
    parts = sorted(result["memory_bytes"].items(), key=lambda part: -part[1])
    return [
        *parts,
        ("training, all of it", result["training_bytes"]),
        ("at the start, target in float32", result["start_bytes"]),
        ("peak with the runtime", result["peak_bytes"]),
    ]
