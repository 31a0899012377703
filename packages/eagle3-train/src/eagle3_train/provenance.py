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
from eagle3_train.resume import write_json

_SUFFIXES = (".jsonl", ".json", ".parquet")
_PACKAGES = ("eagle3-core", "eagle3-train", "torch", "transformers", "accelerate", "safetensors")


def hash_files(sources: Sequence[str]) -> dict[str, str]:
    """sha256 of each source; a `datasets` id stands for itself.

    Raises:
        UserError: what is named like a file is not there.
    """
    return {source: _hash(Path(source)) for source in sources}


def is_current(record: Path, inputs: Mapping[str, Any]) -> bool:
    """Whether the output beside `record` was made from `inputs`; says on stderr why not."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError:
        found = {}
    wanted = json.loads(json.dumps(inputs))
    changed = [k for k in sorted(found.keys() | wanted.keys()) if found.get(k) != wanted.get(k)]
    if changed:
        console.print(f"{record.parent}: made with other {', '.join(changed)}; made again")
    return not changed


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
    if not path.is_file():
        if path.suffix in _SUFFIXES:
            raise UserError(f"{path}: no such file, expected conversations or prompts")
        return "not a file"
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
