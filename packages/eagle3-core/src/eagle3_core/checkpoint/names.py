"""Tensor names of producers -> names of the canonical module."""

import re
from collections.abc import Iterable, Mapping

import torch

from eagle3_core.checkpoint.files import CheckpointFiles
from eagle3_core.checkpoint.report import Report
from eagle3_core.errors import UserError

_ROTARY_BUFFER = re.compile(r"(^|\.)rotary_emb\.")
_LAYER = re.compile(r"layers\.(\d+)\.")


def strip_prefix(name: str) -> str:
    """NeMo Automodel and some re-exports put `model.` before every name."""
    return name.removeprefix("model.")


def canonical_names(
    files: CheckpointFiles, renames: Iterable[tuple[str, str]], report: Report
) -> dict[str, str]:
    """Canonical name -> name in the file; rotary buffers are left out and reported.

    Raises:
        UserError: two tensors of the file would become one.
    """
    rules = [(re.compile(pattern), new) for pattern, new in renames]
    found: dict[str, list[str]] = {}
    for name in files.tensors:
        if _ROTARY_BUFFER.search(name):
            report.ignored.append(f"{name}: rotary tables are computed, not loaded")
            continue
        new = strip_prefix(name)
        for pattern, replacement in rules:
            new = pattern.sub(replacement, new, count=1)
        found.setdefault(new, []).append(name)
    doubled = [" and ".join(sorted(names)) for names in found.values() if len(names) > 1]
    if doubled:
        raise UserError(
            f"{files.folder}: tensors stand twice under two spellings, and only one of each can "
            f"be used: {'; '.join(sorted(doubled))}"
        )
    return {new: names[0] for new, names in found.items()}


def count_layers(names: Iterable[str]) -> int:
    """One more than the highest layer index in the names; 0 without layers."""
    return max((int(m[1]) + 1 for name in names if (m := _LAYER.match(name))), default=0)


def settle_plain_norms(
    files: CheckpointFiles, names: Mapping[str, str], plain: Iterable[int], report: Report
) -> dict[str, str]:
    """Name the one input norm of layers that do not see the embedding.

    vLLM and speculators call it input_layernorm; SGLang, TensorRT-LLM and ModelOpt's Megatron
    export hidden_norm. It is the same function, and a file for all of them holds it twice.

    Raises:
        UserError: both are there and differ, so that engines would compute different things.
    """
    out = dict(names)
    for layer in plain:
        ours, theirs = (f"layers.{layer}.{n}.weight" for n in ("input_layernorm", "hidden_norm"))
        if theirs not in out:
            continue
        in_file = out.pop(theirs)
        if ours not in out:
            out[ours] = in_file
            why = f"{in_file} is the only input norm of a layer that takes hidden states alone"
        elif torch.equal(files.read(out[ours]), files.read(in_file)):
            why = f"{in_file} equals {out[ours]}: one norm under the names of two engines"
        else:
            raise UserError(
                f"{files.folder}: {in_file} and {out[ours]} differ; SGLang uses the former and "
                "vLLM the latter, so the file has no single meaning"
            )
        report.decide(f"layers.{layer} input norm", ours, "tensor shape", why)
    return out
