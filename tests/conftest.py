"""Shared by the packages' tests: a byte tokenizer with ChatML marks, and small random targets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from eagle3_core.target import Target

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")  # ids 256..259
BOS, EOS, IM_END = 256, 257, 259
CHATML = (
    "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}"
    "{{ raise_exception('system comes first') }}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def build_tokenizer(
    template: str | None = CHATML, adds_bos: bool = False
) -> PreTrainedTokenizerFast:
    """One token a UTF-8 byte; `adds_bos` as a post-processor does it when text is encoded."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    letters = {chr(b) if b in printable else chr(next(extra)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def build_target(
    dtype: torch.dtype = torch.float32,
    kind: type[PretrainedConfig] = LlamaConfig,
    seed: int = 0,
    **fields: Any,
) -> Target:
    """A random target with large weights, so that the next token hangs on the whole text.

    Args:
        dtype: of the weights, which are drawn in float32.
        kind: the architecture.
        seed: of the weights.
        fields: of its config, over the defaults here: 272 ids, twelve of which the tokenizer does
            not know, hidden size 32, 4 layers.
    """
    values = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, IM_END],
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**values, **fields}), dtype=torch.float32)
    model = model.to(dtype).eval().requires_grad_(False)
    return Target(name="random", model=model, tokenizer=build_tokenizer())


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """See `build_tokenizer`."""
    return build_tokenizer


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Target]:
    """See `build_target`."""
    return build_target
