"""Targets of several architectures decode as their own code does; others are refused at start."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from eagle3_core import UserError
from eagle3_core.target import Target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate
from eagle3_serve.sampling import SamplingParams

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 39,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA = {"query_pre_attn_scalar": 8}


def _target(pairs: Any, config: PreTrainedConfig) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return Target(name="random", model=model, tokenizer=pairs.target().tokenizer)


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES),
        MistralConfig(**SIZES, sliding_window=5),
        Gemma3TextConfig(**SIZES, sliding_window=4, **GEMMA),
        MixtralConfig(**SIZES, **MOE),
        Qwen3MoeConfig(**SIZES, **QWEN_MOE),
        Gemma2Config(**SIZES, sliding_window=4, attn_logit_softcapping=2.0, **GEMMA),
        GptOssConfig(**SIZES, **MOE, sliding_window=4),
    ],
    ids=lambda config: config.model_type,
)
def test_equals_the_models_own_code(pairs: Any, config: PreTrainedConfig) -> None:
    target = _target(pairs, config)
    prompts = [[3, 4, 5, 6, 7, 8, 9], [11], [20, 21, 22]]
    expected = [pairs.greedy(target, prompt, 14) for prompt in prompts]
    params = SamplingParams(max_tokens=14, temperature=0)
    draft = pairs.draft(target)
    for engine in (
        Engine(target, None, EngineConfig()),
        Engine(target, draft, EngineConfig(num_speculative_tokens=3)),
    ):
        outputs, _ = generate(engine, prompts, params)
        assert [output.token_ids for output in outputs] == expected


def test_refuses_layers_without_attention_at_start(pairs: Any) -> None:
    config = FalconMambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(UserError, match="FalconMamba"):
        Engine(_target(pairs, config), None, EngineConfig())


def test_refuses_attention_it_does_not_have(pairs: Any) -> None:
    target = _target(pairs, Gemma3TextConfig(**SIZES, sliding_window=4, **GEMMA))
    attend = target.model.model.layers[2].self_attn.forward

    def biased(*args: Any, **kwargs: Any) -> Any:
        return attend(*args, **kwargs, alibi=torch.ones(1))

    target.model.model.layers[2].self_attn.forward = biased
    with pytest.raises(UserError, match="needs 'alibi', which this engine does not have"):
        Engine(target, None, EngineConfig())


def test_rotary_tables_that_change_with_the_length_end_a_sequence(pairs: Any) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 24,
    }
    target = pairs.target(rope_parameters=rope)
    assert target.max_position_embeddings == 128
    engine = Engine(target, None, EngineConfig())
    assert engine.max_model_len == 24
    outputs, _ = generate(engine, [[3, 4, 5]], SamplingParams(temperature=0, ignore_eos=True))
    assert len(outputs[0].token_ids) == 21
    with pytest.raises(UserError, match=r"max_model_len is 25, but the target .* 24"):
        Engine(target, None, EngineConfig(max_model_len=25))


def test_exact_is_refused_where_it_cannot_be_kept(pairs: Any) -> None:
    target = _target(pairs, MixtralConfig(**SIZES, **MOE))
    with pytest.raises(UserError, match=r"exact: target random .* packed linears"):
        Engine(target, None, EngineConfig(exact=True))
