"""From a target of each kind to answers that its draft took part in: fit, then serve."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from eagle3_core import load_draft
from eagle3_core.target import Target, load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate
from eagle3_serve.sampling import SamplingParams
from eagle3_train.cli import main

PROMPTS = [list(b"hello"), list(b"x")]
# With the hidden size of the draft: the target's, or a narrower one.
KINDS: list[tuple[type[PretrainedConfig], dict[str, Any], int]] = [
    (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}, 32),
    (
        Qwen3MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
        },
        24,
    ),
]


@pytest.mark.parametrize(
    ("kind", "fields", "hidden_size"), KINDS, ids=[kind.model_type for kind, *_ in KINDS]
)
def test_a_mixture_of_experts(
    make_target: Callable[..., Target],
    tmp_path: Path,
    kind: type[PretrainedConfig],
    fields: dict[str, Any],
    hidden_size: int,
) -> None:
    made = make_target(kind=kind, **fields)
    made.model.save_pretrained(tmp_path / "target")
    made.tokenizer.save_pretrained(tmp_path / "target")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "abcdefgh"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    values = {
        "output": str(tmp_path / "out"),
        "target": str(tmp_path / "target"),
        "data": {"train": [str(tmp_path / "rows.jsonl")]},
        "capture": {"aux_layer_ids": [1, 2, 4]},
        "draft": {"hidden_size": hidden_size, "vocab_size": 64},
        "fit": {"ttt_length": 2, "max_steps": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    for stage in ("capture", "fit"):
        assert main([stage, str(tmp_path / "run.yaml")]) == 0

    target = load_target(tmp_path / "target")
    draft = load_draft(tmp_path / "out/draft", target=target).draft
    assert draft.config.hidden_size == hidden_size
    engine = Engine(target, draft, EngineConfig(num_speculative_tokens=3))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    outputs, _ = generate(engine, PROMPTS, params)
    assert [o.token_ids for o in outputs] == [_greedy(made, prompt, 8) for prompt in PROMPTS]
    assert engine.stats.num_drafted_tokens > 0


def _greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """By whole passes of the model's own code."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
