"""On the Triton kernels the engine says what it says in plain torch, token for token."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from eagle3_core import UserError
from eagle3_core.target import Target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.sampling import SamplingParams
from eagle3_serve.triton_decoder import TritonDecoder
from eagle3_serve.verify import RoundTrace

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 39,
}
LLAMA = LlamaConfig(**SIZES)
WINDOWED = {"sliding_window": 4}
PROMPTS = [[3, 9, 1, 4, 7, 8, 20, 6, 5], [7]]
PARAMS = [
    SamplingParams(max_tokens=5, temperature=0, trace=True),
    SamplingParams(max_tokens=6, seed=2, temperature=0.7, trace=True),
]
CHAIN = {"num_speculative_tokens": 2}
TREE = {"num_speculative_tokens": 3, "topk": 2, "num_verify_tokens": 6}


def a_target(pairs: Any, config: PreTrainedConfig) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return Target(name="random", model=model, tokenizer=pairs.target().tokenizer)


@pytest.fixture(scope="module")
def fitted(pairs: Any) -> Any:
    """A draft that is often right about the first Llama."""
    target = a_target(pairs, LLAMA)
    draft = pairs.draft(target, aux_layer_ids=(0, 1, 2))
    pairs.fit(target, draft, PROMPTS, 9)
    return draft


def rounds(
    pairs: Any, config: PreTrainedConfig, draft: Any, ops: str, count: int = 2, **options: Any
) -> list[list[tuple[list[int], RoundTrace | None]]]:
    """Of the first requests, what every round emitted, and what it had drafted."""
    limits = {"page_size": 4, "max_num_batched_tokens": 7, "max_model_len": 40}
    target = a_target(pairs, config)
    engine = Engine(target, copy.deepcopy(draft), EngineConfig(**limits, ops=ops, **options))
    is_standard = config.model_type in ("llama", "mistral", "qwen3")
    assert isinstance(engine._runner._decoder, TritonDecoder) == (ops == "triton" and is_standard)
    ids = [engine.add(p, own) for p, own in list(zip(PROMPTS, PARAMS, strict=True))[:count]]
    found: dict[str, list[Any]] = {i: [] for i in ids}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].append((output.token_ids, output.trace))
    return [found[i] for i in ids]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_chains_and_trees(pairs: Any, fitted: Any, shape: dict[str, int]) -> None:
    found = rounds(pairs, LLAMA, fitted, "triton", **shape)
    assert found == rounds(pairs, LLAMA, fitted, "reference", **shape)
    assert max(len(tokens) for tokens, _ in found[0]) > 1  # drafts were accepted


@pytest.mark.parametrize(
    ("config", "choices"),
    [
        (
            MistralConfig(**SIZES, **WINDOWED),
            {"sliding_window": 5, "draft_vocab_size": 30, "residual": "normed"},
        ),
        (
            Qwen3Config(**SIZES),
            {"num_hidden_layers": 2, "layer_input": "every", "qk_norm": True},
        ),
        (
            Gemma2Config(**SIZES, **WINDOWED, attn_logit_softcapping=2.0, query_pre_attn_scalar=8),
            {"feedback": "post_norm", "attention_bias": True, "mlp_bias": True},
        ),
        (
            GptOssConfig(**SIZES, **WINDOWED, num_local_experts=2, num_experts_per_tok=1),
            {"num_hidden_layers": 2, "aux_norm": "per_layer"},
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_architectures(pairs: Any, config: PreTrainedConfig, choices: dict[str, Any]) -> None:
    draft = pairs.draft(a_target(pairs, config), aux_layer_ids=(0, 1, 2), **choices)
    found = rounds(pairs, config, draft, "triton", 1, **TREE)
    assert found == rounds(pairs, config, draft, "reference", 1, **TREE)


def test_refuses_what_the_kernels_cannot_do(pairs: Any, fitted: Any) -> None:
    target = a_target(pairs, LLAMA)
    with pytest.raises(UserError, match=r"exact: .* packed linears"):
        Engine(target, None, EngineConfig(exact=True, ops="triton"))
    tree = {"num_speculative_tokens": 6, "topk": 5, "num_verify_tokens": 65}
    with pytest.raises(UserError, match=r"num_verify_tokens is 65, .* up to 64 rows.*reference"):
        Engine(target, fitted, EngineConfig(ops="triton", **tree))
    with pytest.raises(UserError, match="ops is 'cuda', expected one of"):
        EngineConfig(ops="cuda")
