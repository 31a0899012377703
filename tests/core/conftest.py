"""Tiny targets: random weights, real architectures, a byte-level tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=5),
    "gemma2": lambda: Gemma2Config(**SHAPE, sliding_window=5),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, sliding_window=5),
    "mixtral": lambda: MixtralConfig(**SHAPE, **ROUTED),
    "gpt_oss": lambda: GptOssConfig(**SHAPE, **ROUTED),
    "gpt2": lambda: GPT2Config(
        vocab_size=300, n_embd=32, n_layer=4, n_head=4, n_positions=128, eos_token_id=257
    ),
}


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], PreTrainedModel]:
    """Architecture name -> a random causal LM: 4 layers, hidden 32, 300 ids, eval, no gradients."""

    def build(name: str) -> PreTrainedModel:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(ARCHITECTURES[name](), dtype=torch.float32)
        for parameter in model.parameters():
            # unit-scale norms and zero biases would hide a swapped or dropped one
            torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
        return model.eval().requires_grad_(False)

    return build


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, then bos 256, eos 257 and pad 258; with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


@pytest.fixture
def target_dir(
    tmp_path: Path,
    tiny_model: Callable[[str], PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Callable[[str], Path]:
    """Architecture name -> a saved model directory with its tokenizer."""

    def write(name: str) -> Path:
        folder = tmp_path / name
        tiny_model(name).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return write
