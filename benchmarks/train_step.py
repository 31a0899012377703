"""How fast and how lean is a training step, beside SpecForge and speculators?

    benchmarks/train_step.py [--preset smollm2|8b] [--seq S] [--dtype float32|bfloat16] [--alone]

Forward and backward of T unroll steps, teacher included, on the same weights and one document of S
tokens of which every other run of 128 is supervised. Every system is a process of its own; their
steps take turns. Under a peer's loss convention the loss must be the peer's before anything is
timed. The peers run in .venv-interop (`make interop-peers`); without it, or with --alone, only this
project runs. Prints one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_core.vocab import vocab_map

ROOT = Path(__file__).resolve().parents[1]
WORKERS = ROOT / "interop" / "train_step"
RUN = 128  # supervised and unsupervised tokens alternate in runs of this length

PRESETS = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "draft_vocab_size": 16384,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    },
}


@dataclass(frozen=True)
class System:
    """A module of interop/train_step and the loss convention it is asked for."""

    module: str
    convention: str
    peer: bool

    @property
    def name(self) -> str:
        return self.convention if self.peer else f"eagle3-train ({self.convention})"


OURS = [System("ours", c, peer=False) for c in ("strict", "specforge", "speculators")]
PEERS = [System(f"by_{c}", c, peer=True) for c in ("specforge", "speculators")]


def make_case(sizes: dict[str, int], seq: int) -> dict[str, Tensor]:
    """Weights, tokens and states, named as interop/train_step/case.py reads them."""
    g = torch.Generator().manual_seed(0)
    hidden, inter, vocab = (sizes[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    q = sizes["num_attention_heads"] * sizes["head_dim"]
    kv = sizes["num_key_value_heads"] * sizes["head_dim"]
    shapes = {
        "embed_tokens.weight": (vocab, hidden),
        "fc.weight": (hidden, 3 * hidden),
        "layers.0.self_attn.q_proj.weight": (q, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (kv, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (kv, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, q),
        "layers.0.mlp.gate_proj.weight": (inter, hidden),
        "layers.0.mlp.up_proj.weight": (inter, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inter),
        "lm_head.weight": (sizes["draft_vocab_size"], hidden),
    }
    case = {f"draft.{n}": torch.randn(s, generator=g) * s[1] ** -0.5 for n, s in shapes.items()}
    layer_norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in ("norm", *(f"layers.0.{n}" for n in layer_norms)):
        case[f"draft.{name}.weight"] = torch.ones(hidden)

    head = torch.randn(vocab, hidden, generator=g) * 2 * hidden**-0.5
    order = torch.randperm(vocab, generator=g)
    choice = order[torch.randint(sizes["draft_vocab_size"] // 2, (seq,), generator=g)]
    states = torch.randn(seq, hidden, generator=g) + 0.15 * hidden**0.5 * head[choice]
    final = states * torch.rsqrt(states.square().mean(-1, keepdim=True))
    logits = [rows @ head.T for rows in final.split(512)]
    argmax = torch.cat([rows.argmax(-1) for rows in logits])
    # As with real text nearly always: no row drops out because its token cannot be drafted.
    kept = torch.cat([argmax.unique(), order[~torch.isin(order, argmax)]])
    d2t, t2d = vocab_map(kept[: sizes["draft_vocab_size"]], vocab)
    case |= {
        "draft.d2t": d2t,
        "draft.t2d": t2d,
        "head": head,
        "final": final,
        "ids": torch.randint(1, vocab, (seq,), generator=g),
        "loss_mask": torch.arange(seq) // RUN % 2 == 1,
        "aux": torch.randn(seq, 3 * hidden, generator=g),
        "argmax": argmax,
        "logz": torch.cat([rows.logsumexp(-1) for rows in logits]),
    }
    return case


class Worker:
    """A running system."""

    def __init__(self, system: System, folder: Path, python: Path) -> None:
        self.system = system
        environment = dict(os.environ)
        environment.pop("OMP_NUM_THREADS", None)  # the worker sets its threads
        if system.peer and not torch.cuda.is_available():
            environment |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
        self._process = subprocess.Popen(
            [
                str(python) if system.peer else sys.executable,
                str(WORKERS / "worker.py"),
                system.module,
                system.convention,
                str(folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._read()

    def ask(self, what: str) -> dict[str, Any]:
        """`step` or `count` -> the worker's answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.system.name} ended with status {self._process.wait()}")
        return json.loads(line)


def matmul_rate(dtype: torch.dtype, threads: int) -> float:
    """FLOP/s of a large square product: what the arithmetic alone is held against."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 2048
    torch.set_num_threads(threads)
    a = torch.randn(size, size, device=device, dtype=dtype)
    out, best = torch.empty_like(a), 0.0
    for _ in range(8):
        began = time.perf_counter()
        torch.mm(a, a, out=out)
        float(out[0, 0])  # waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def check_losses(answers: dict[System, dict[str, Any]], bound: float) -> None:
    """Under a peer's convention the loss is the peer's, up to rounding (`bound`, relative)."""
    for peer in (system for system in answers if system.peer):
        mine = next(s for s in answers if not s.peer and s.convention == peer.convention)
        theirs, ours = answers[peer]["loss"], answers[mine]["loss"]
        if abs(theirs - ours) > bound * abs(theirs):
            raise SystemExit(f"{peer.name} has loss {theirs}, {mine.name} {ours}")


def run(
    systems: Sequence[System], folder: Path, python: Path, steps: int, bound: float
) -> dict[System, dict[str, Any]]:
    """Check the losses, then time `steps` steps of each system in turn.

    Returns:
        Of each system the last answer, with `seconds` of every step.
    """
    workers = [Worker(system, folder, python) for system in systems]
    check_losses({worker.system: worker.ask("step") for worker in workers}, bound)
    turns = [[worker.ask("step") for worker in workers] for _ in range(steps)]
    out = {}
    for i, worker in enumerate(workers):
        out[worker.system] = worker.ask("count") | {
            "growth": turns[-1][i]["growth"],
            "seconds": [turn[i]["seconds"] for turn in turns],
        }
        worker.close()
    return out


def describe(answer: dict[str, Any], seq: int, rate: float) -> dict[str, Any]:
    """What is reported of one system."""
    median = statistics.median(answer["seconds"])
    return {
        "tokens_per_s": round(seq / median, 1),
        "seconds": [round(s, 3) for s in answer["seconds"]],
        "memory_growth_mib": round(answer["growth"] / 2**20),
        "loss": answer["loss"],
        "matmul_tflop": round(answer["flops"] / 1e12, 4),
        "share_of_matmul_rate": round(answer["flops"] / median / rate, 3),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="smollm2")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--ttt-length", type=int, default=7)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--peer-python", type=Path, default=ROOT / ".venv-interop/bin/python")
    arguments = parser.parse_args()

    sizes = PRESETS[arguments.preset]
    names = ("seq", "ttt_length", "dtype", "threads")
    settings = {"sizes": sizes, **{n: getattr(arguments, n) for n in names}}
    rate = matmul_rate(getattr(torch, arguments.dtype), arguments.threads)
    with_peers = not arguments.alone and arguments.peer_python.exists()
    systems = [*OURS, *PEERS] if with_peers else OURS[:1]
    bound = 1e-4 if arguments.dtype == "float32" else 1e-2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(make_case(sizes, arguments.seq), folder / "case.safetensors")
        (folder / "settings.json").write_text(json.dumps(settings))
        answers = run(systems, folder, arguments.peer_python, arguments.steps, bound)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    report = {
        "settings": settings | {"commit": commit, "machine": platform.machine()},
        "matmul_gflop_per_s": round(rate / 1e9, 1),
        "systems": {s.name: describe(a, arguments.seq, rate) for s, a in answers.items()},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
