"""What lies in a checkpoint folder: its config and, tensor by tensor, the file that holds it.

Opening reads headers only. Values come from the file an index names, else from the one candidate
file; everything else in the folder is listed as ignored, never mixed in.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3_core.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_MAX_HEADER = 100_000_000  # bytes; the safetensors format's own limit
_CHUNK = 1 << 22  # elements of a streaming scan, so that memory stays flat


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what its header says."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CheckpointFiles:
    """An opened checkpoint folder. `tensors` maps names in the files to their headers."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    ignored: tuple[str, ...] = ()
    _pickled: dict[Path, dict[str, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> "CheckpointFiles":
        """Read config.json and the headers of the weight files.

        Raises:
            UserError: not a folder, no or several weight files, a broken file or index.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no such folder; expected a checkpoint folder with config.json and"
                " safetensors (a hub name must be downloaded first)"
            )
        config = read_json(folder / "config.json")
        index = next((folder / name for name in _INDEXES if (folder / name).exists()), None)
        pickled: dict[Path, dict[str, Tensor]] = {}
        if index is not None:
            tensors, ignored = _open_indexed(index, pickled)
        else:
            file, ignored = _only_candidate(folder)
            tensors = _open_file(file, pickled)
        return cls(folder, config, tensors, ignored, pickled)

    @property
    def where(self) -> Path:
        """The weight file, or the folder when there are several: for messages."""
        held = {info.file for info in self.tensors.values()}
        return held.pop() if len(held) == 1 else self.folder

    def read(self, name: str) -> Tensor:
        """The values of one tensor, by its name in the file."""
        info = self.tensors[name]
        if info.file in self._pickled:
            return self._pickled[info.file][name].clone()
        with safe_open(info.file, "pt") as opened:
            return opened.get_tensor(name)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The values of one tensor in flat pieces, in order, without holding them all."""
        info = self.tensors[name]
        if info.file in self._pickled:
            yield from self._pickled[info.file][name].flatten().split(_CHUNK)
        elif not info.shape:
            yield self.read(name).flatten()
        else:
            row = max(1, math.prod(info.shape[1:]))
            step = max(1, _CHUNK // row)
            for start in range(0, info.shape[0], step):
                with safe_open(info.file, "pt") as opened:
                    yield opened.get_slice(name)[start : start + step].flatten()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: missing, unreadable, not JSON, or not an object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; a checkpoint folder holds config.json and safetensors"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds a {type(found).__name__}, expected a JSON object")
    return found


def _only_candidate(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """-> (the weights, other files that are left alone)."""
    every = sorted({*folder.glob("*.safetensors"), *folder.glob("*.bin")})
    named = [file for file in every if file.name in _SINGLE]
    found = named or every
    if not found:
        raise UserError(
            f"{folder}: no weights; expected model.safetensors, pytorch_model.bin or an index"
        )
    if len(found) > 1:
        names = ", ".join(p.name for p in found)
        raise UserError(
            f"{folder}: {names} could each hold the weights and no index says which; "
            "keep one of them"
        )
    others = tuple(f"{f.name}: not the weights" for f in every if f != found[0])
    return found[0], others


def _open_indexed(
    index: Path, pickled: dict[Path, dict[str, Tensor]]
) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    folder, weight_map = index.parent, read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(v, str) and v == Path(v).name for v in weight_map.values()
    ):
        raise UserError(f"{index}: weight_map must map tensor names to file names in this folder")
    shards = {name: folder / name for name in sorted(set(weight_map.values()))}
    for name, file in shards.items():
        if not file.exists():
            promised = sorted(t for t, shard in weight_map.items() if shard == name)
            raise UserError(
                f"{file}: no such file, but {index.name} promises {', '.join(promised)} in it"
            )
    headers = {name: _open_file(file, pickled) for name, file in shards.items()}
    tensors: dict[str, TensorInfo] = {}
    for tensor, shard in weight_map.items():
        if tensor not in headers[shard]:
            raise UserError(f"{shards[shard]}: {tensor} is not in it, but {index.name} says so")
        tensors[tensor] = headers[shard][tensor]
    ignored = [
        f"{tensor} in {shard}: {index.name} "
        + (f"assigns it to {weight_map[tensor]}" if tensor in weight_map else "does not list it")
        for shard, header in headers.items()
        for tensor in header
        if weight_map.get(tensor) != shard
    ]
    stray = {*folder.glob("*.safetensors"), *folder.glob("*.bin")} - set(shards.values())
    ignored += [f"{file.name}: {index.name} does not name it" for file in sorted(stray)]
    return tensors, tuple(ignored)


def _open_file(file: Path, pickled: dict[Path, dict[str, Tensor]]) -> dict[str, TensorInfo]:
    if file.suffix == ".safetensors":
        return read_header(file)
    pickled[file] = _load_pickle(file)
    return {n: TensorInfo(file, n, t.dtype, tuple(t.shape)) for n, t in pickled[file].items()}


def _load_pickle(file: Path) -> dict[str, Tensor]:
    try:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the pre-1.6 format cannot be mapped
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{file}: not a readable torch file: {_first_line(error)}") from None
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise UserError(f"{file}: holds no plain state dict of tensors")
    return found


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of a safetensors file, without touching its values.

    Raises:
        UserError: the header is broken, or the file is shorter or longer than it promises.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise UserError(f"{file}: not a safetensors file, or cut within its header")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: broken safetensors header: {_first_line(error)}") from None
    try:
        return _parse_header(file, header, size - 8 - length)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: broken safetensors header: {_first_line(error)}") from None


def _parse_header(file: Path, header: dict[str, Any], held: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise UserError(
                f"{file}: {name} has dtype {entry['dtype']}, expected one of {', '.join(DTYPES)}"
            )
        shape = tuple(int(n) for n in entry["shape"])
        info = TensorInfo(file, name, DTYPES[entry["dtype"]], shape)
        start, end = (int(n) for n in entry["data_offsets"])
        if end - start != info.num_bytes:
            raise UserError(
                f"{file}: {name} spans {end - start} bytes, its shape needs {info.num_bytes}"
            )
        tensors[name] = info
        spans.append((start, end, name))
    position = 0
    for start, end, name in sorted(spans):
        if start != position:
            raise UserError(f"{file}: {name} starts at byte {start}, expected {position}")
        position = end
    if position != held:
        state = "cut short" if held < position else "too long"
        raise UserError(
            f"{file}: {state}: the header promises {position} bytes of values, "
            f"the file holds {held}"
        )
    return tensors


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
