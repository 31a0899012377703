"""Prepared examples on disk, reused while everything that they depend on is the same.

One safetensors file: the tokens of all examples laid end to end, and in its metadata the account
and what it was made from. A template that writes the date keeps the day it was prepared on, so that
a run that goes on tomorrow goes on with the same tokens.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eagle3_train.data.drops import Drops
from eagle3_train.data.mask import Example
from eagle3_train.data.prepare import Prepared, SourceCounts
from eagle3_train.data.template import ChatTemplate
from eagle3_train.display import console
from eagle3_train.provenance import NOT_A_FILE, changed_inputs, hash_files


def prepared_from(
    sources: Sequence[str], template: ChatTemplate, max_length: int, strict: bool
) -> dict[str, Any] | None:
    """What the examples depend on; None where it can't be known, as with data from a hub.

    Raises:
        UserError: a source is missing.
    """
    files = hash_files(sources)
    if NOT_A_FILE in files.values():
        return None
    return {
        "data": [[source, files[source]] for source in sources],
        "tokenizer": _digest(template.tokenizer_json),
        "chat template": _digest(template.source),
        "template_arguments": template.arguments,
        "end-of-turn ids": sorted(template.eos_token_ids),
        "max_length": max_length,
        "strict": strict,
        "code": _code_digest(),
    }


def cached(path: Path, inputs: Mapping[str, Any] | None, make: Callable[[], Prepared]) -> Prepared:
    """The examples in `path` if they were made from `inputs`, else what `make` makes, kept there.

    Args:
        path: a safetensors file, which may not exist.
        inputs: of `prepared_from`; None = always anew, nothing is kept.
        make: prepares.
    """
    if inputs is None:
        return make()
    if path.exists():
        found = _load(path, inputs)
        if found is not None:
            return found
    prepared = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    _save(path, prepared, inputs)
    return prepared


def _load(path: Path, inputs: Mapping[str, Any]) -> Prepared | None:
    """None, and a sentence about it, where the file is stale or torn."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            changed = changed_inputs(json.loads(metadata["inputs"]), inputs)
            if changed:
                console.print(
                    f"{path}: made with other {', '.join(changed)}; made again", markup=False
                )
                return None
            account = json.loads(metadata["account"])
            ids, masks = file.get_tensor("input_ids"), file.get_tensor("loss_mask")
            lengths = file.get_tensor("lengths").tolist()
    except (OSError, SafetensorError, KeyError, ValueError):
        console.print(f"{path}: is not a whole file of prepared examples; made again", markup=False)
        return None
    console.print(f"{path} holds the prepared examples", markup=False)
    drops = Drops()
    drops.rows = [(where, reason) for where, reason in account.pop("dropped")]
    names = account.pop("examples")
    examples = [
        Example(where, part.long(), mask)
        for where, part, mask in zip(names, ids.split(lengths), masks.split(lengths), strict=True)
    ]
    sources = {name: SourceCounts(**counts) for name, counts in account.pop("sources").items()}
    return Prepared(examples, drops, sources, **account)


def _save(path: Path, prepared: Prepared, inputs: Mapping[str, Any]) -> None:
    examples = prepared.examples
    tensors = {
        "input_ids": torch.cat([example.input_ids for example in examples]).int(),
        "loss_mask": torch.cat([example.loss_mask for example in examples]),
        "lengths": torch.tensor([len(example.input_ids) for example in examples]),
    }
    account = {
        "examples": [example.where for example in examples],
        "dropped": prepared.drops.rows,
        "sources": {name: asdict(counts) for name, counts in prepared.sources.items()},
        "max_length": prepared.max_length,
        "cut_rows": prepared.cut_rows,
        "cut_supervised_tokens": prepared.cut_supervised_tokens,
        "replaced_surrogates": prepared.replaced_surrogates,
        "notes": prepared.notes,
    }
    metadata = {"inputs": json.dumps(inputs), "account": json.dumps(account)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # processes may do it at once
    save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, path)


def _code_digest() -> str:
    """Of the modules that turn rows into tokens: another version may mask otherwise."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
