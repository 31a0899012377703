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
from eagle3_serve.generate import generate
from eagle3_serve.sampling import SamplingParams
from eagle3_serve.triton_decoder import TritonDecoder

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
PROMPTS = [[3, 9, 1, 4, 7, 8, 20, 6, 5], [7], [11, 2, 30]]
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0),
    SamplingParams(max_tokens=9, seed=2, temperature=0.7),
    SamplingParams(max_tokens=9, seed=3, top_k=9, top_p=0.9),
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


def text(
    pairs: Any, config: PreTrainedConfig, draft: Any, ops: str, **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    target = a_target(pairs, config)
    own = None if draft is None else copy.deepcopy(draft)
    limits = {"page_size": 4, "max_num_batched_tokens": 7, "max_model_len": 40}
    engine = Engine(target, own, EngineConfig(**limits, ops=ops, **options))
    assert isinstance(engine._runner._decoder, TritonDecoder) == (
        ops == "triton" and config.model_type in ("llama", "mistral", "qwen3")
    )
    outputs, figures = generate(engine, PROMPTS, PARAMS)
    return [output.token_ids for output in outputs], figures


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_chains_and_trees(pairs: Any, fitted: Any, shape: dict[str, int]) -> None:
    expected, plain = text(pairs, LLAMA, fitted, "reference", **shape)
    found, figures = text(pairs, LLAMA, fitted, "triton", **shape)
    assert found == expected
    assert figures["accepted_per_position"] == plain["accepted_per_position"]
    assert figures["accept_length"] > 1.2


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZES, **WINDOWED),
        Qwen3Config(**SIZES),
        Gemma2Config(**SIZES, **WINDOWED, attn_logit_softcapping=2.0, query_pre_attn_scalar=8),
        GptOssConfig(**SIZES, **WINDOWED, num_local_experts=2, num_experts_per_tok=1),
    ],
    ids=lambda config: config.model_type,
)
def test_architectures(pairs: Any, config: PreTrainedConfig) -> None:
    choices = {"aux_layer_ids": (0, 1, 2), "sliding_window": 5, "draft_vocab_size": 30}
    draft = pairs.draft(a_target(pairs, config), **choices)
    expected, _ = text(pairs, config, draft, "reference", **TREE)
    found, _ = text(pairs, config, draft, "triton", **TREE)
    assert found == expected


def test_refuses_what_the_kernels_cannot_do(pairs: Any, fitted: Any) -> None:
    target = a_target(pairs, LLAMA)
    with pytest.raises(UserError, match=r"exact: .* packed linears"):
        Engine(target, None, EngineConfig(exact=True, ops="triton"))
    tree = {"num_speculative_tokens": 6, "topk": 5, "num_verify_tokens": 65}
    with pytest.raises(UserError, match=r"num_verify_tokens is 65, .* up to 64 .* reference"):
        Engine(target, fitted, EngineConfig(ops="triton", **tree))
    with pytest.raises(UserError, match="ops is 'cuda', expected one of"):
        EngineConfig(ops="cuda")
