"""What a result was made from: recorded beside it, compared before it is reused."""

import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_core import UserError
from eagle3_train.display import console
from eagle3_train.resume import comparable, write_json

_SUFFIXES = (".jsonl", ".json", ".parquet")
NOT_A_FILE = "not a file"
_PACKAGES = ("eagle3-core", "eagle3-train", "torch", "transformers", "accelerate", "safetensors")


def hash_files(sources: Sequence[str]) -> dict[str, str]:
    """sha256 of each source, of a folder with all it holds; a `datasets` id stands for itself.

    Raises:
        UserError: what is named like a file is not there.
    """
    return {source: _hash(Path(source)) for source in sources}


def recorded_inputs(record: Path) -> dict[str, Any] | None:
    """What the output beside `record` was made from; None = never completed."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def changed_inputs(found: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[str]:
    """Names of the recorded inputs that are different now."""
    wanted = comparable(found, json.loads(json.dumps(inputs)))
    return [k for k in sorted(found.keys() | wanted.keys()) if found.get(k) != wanted.get(k)]


def is_current(output: Path, record: Path, inputs: Mapping[str, Any]) -> bool:
    """Whether `output` is complete and made from `inputs`; says on stderr that it is, or why not.

    Raises:
        UserError: the record cannot be read.
    """
    found = recorded_inputs(record)
    if found is None or not output.exists():
        return False
    if changed := changed_inputs(found, inputs):
        console.print(f"{output}: made with other {', '.join(changed)}; made again", markup=False)
        return False
    console.print(f"{output} is complete", markup=False)
    return True


def record_inputs(record: Path, inputs: Mapping[str, Any]) -> None:
    """Note what the output beside `record` was made from, once it is complete."""
    write_json(record, inputs)


def describe_run(argv: Sequence[str], seed: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Content of run.json."""
    return {
        "argv": list(argv),
        "commit": _commit(),
        "seed": seed,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": f"{sys.platform} {platform.machine()}",
        "identity": dict(identity),
    }


def _hash(path: Path) -> str:
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES)
        listing = "".join(f"{_hash(file)} {file.name}\n" for file in files)
        return hashlib.sha256(listing.encode()).hexdigest()
    if not path.is_file():
        if path.suffix in _SUFFIXES:
            raise UserError(f"{path}: no such file, expected conversations or prompts")
        return NOT_A_FILE
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _commit() -> str | None:
    """Of the checkout this code runs from; None when it is installed from a wheel."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
