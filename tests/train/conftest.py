"""A byte tokenizer with ChatML marks, and a small random target that speaks it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3_core.target import Target
from eagle3_train.data import ChatTemplate

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")  # ids 256..259
BOS, EOS, IM_START, IM_END = range(256, 260)
VOCAB_SIZE = 272  # twelve rows that the tokenizer does not know
CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
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
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
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


def build_target(dtype: torch.dtype = torch.float32, max_position_embeddings: int = 256) -> Target:
    """Large weights: the next token hangs on the whole text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=[EOS, IM_END],
    )
    model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
    return Target(name="random", model=model, tokenizer=build_tokenizer())


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """See `build_tokenizer`."""
    return build_tokenizer


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Target]:
    """See `build_target`."""
    return build_target


@pytest.fixture(scope="session")
def target() -> Target:
    return build_target()


@pytest.fixture(scope="session")
def chatml() -> ChatTemplate:
    return ChatTemplate(build_tokenizer(), eos_token_ids=(EOS, IM_END))


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Write JSON lines under a name; returns the path as text."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def chat() -> Callable[..., list[dict[str, str]]]:
    """chat("hi", "hello", "and?", ...): user and assistant in turn."""

    def build(*texts: str) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]

    return build


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`build_target` as a folder that commands can load."""
    folder = tmp_path_factory.mktemp("target")
    built = build_target()
    built.model.save_pretrained(folder)
    built.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def write_run(target_folder: Path) -> Callable[[Path], Path]:
    """Folder -> a config in it: 16 conversations to learn from, 4 held out, a few small steps."""

    def write(folder: Path) -> Path:
        for name, count in (("train", 16), ("eval", 4)):
            rows = [
                {
                    "messages": [
                        {"role": "user", "content": f"{name} {i}" * (1 + i % 3)},
                        {"role": "assistant", "content": "abcdefghij"[i % 5 :] * 2},
                    ]
                }
                for i in range(count)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        values = {
            "output": str(folder / "out"),
            "target": str(target_folder),
            "data": {"train": [str(folder / "train.jsonl")], "eval": [str(folder / "eval.jsonl")]},
            "capture": {"aux_layer_ids": [1, 2, 3]},
            "draft": {"vocab_size": 64, "init": "least_squares"},
            "fit": {
                "ttt_length": 3,
                "batch_tokens": 200,
                "micro_batch_tokens": 120,
                "epochs": 2,
                "learning_rate": 1e-3,
            },
            "eval": {"num_speculative_tokens": 3, "every": 4},
        }
        path = folder / "run.yaml"
        path.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
        return path

    return write
