"""commit: the accepted rows move together, keys and values with them, and the next round is set."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from eagle3_serve.ops.commit import reference as plain
from eagle3_serve.ops.tree_attention import Segments
from eagle3_serve.ops.verify import Verified

PAGE, LAYERS, HEADS, DIM, WIDTH, NODES = 3, 2, 3, 5, 7, 6


def verified(paths: list[list[int]], levels: int) -> Verified:
    """What `verify` says of accepted paths; behind row r of request b comes 100·b+r+1."""

    def padded(rows: list[list[int]], fill: int) -> Tensor:
        padded = [row + [fill] * (levels - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64).view(len(rows), levels)

    tokens = [[100 * b + r + 1 for r in path] for b, path in enumerate(paths)]
    counts = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int64)
    return Verified(counts, padded(paths, -1), padded(tokens, -1), torch.zeros(len(paths), levels))


def segments_of(past: list[int], missing: int | None) -> Segments:
    batch, count = len(past), -(-(max([*past, 0]) + NODES) // PAGE)
    pages = torch.arange(batch * count, dtype=torch.int32).flip(0).view(batch, count).contiguous()
    if missing is not None:
        pages[missing] = -1
    empty = torch.empty(batch, dtype=torch.int32)
    own = torch.tensor(past, dtype=torch.int32)
    return Segments(empty, empty, own, pages, PAGE, NODES, count * PAGE)


@pytest.mark.parametrize("module", [plain], ids=["reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("past", "paths", "missing"),
    [
        ([4], [[0]], None),
        ([4], [[0, 1, 2]], None),
        ([0], [[0, 2, 3, 5]], None),
        ([5, 0, 7], [[0, 1, 3, 4], [0], [0, 5]], None),
        ([5, 2], [[0, 2, 4], [0, 2, 4]], 1),
        ([], [], None),
    ],
)
def test_accepted_rows_move_together(
    module: ModuleType,
    dtype: torch.dtype,
    past: list[int],
    paths: list[list[int]],
    missing: int | None,
):
    levels, batch = 4, len(past)
    segments = segments_of(past, missing)
    slots = segments.pages.numel() * PAGE
    keys = torch.randn(LAYERS, HEADS, slots, DIM).to(dtype)
    values = -keys
    wide = torch.randn(batch, NODES, WIDTH + 2).to(dtype)
    aux, roots = wide[..., :WIDTH], torch.full((batch,), 9)
    expected_keys = keys.clone()
    for b, path in enumerate(paths):
        if b != missing:
            places = segments.slots(torch.arange(segments.max_length).expand(batch, -1))[b]
            for i, row in enumerate(path):
                expected_keys[:, :, places[past[b] + i]] = keys[:, :, places[past[b] + row]]
    found = module.commit(verified(paths, levels), aux, roots, segments, keys, values)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, -expected_keys)
    assert roots.tolist() == [100 * b + path[-1] + 1 for b, path in enumerate(paths)]
    assert segments.past.tolist() == [p + len(path) for p, path in zip(past, paths, strict=True)]
    assert found.past.tolist() == past
    assert found.num_rows.tolist() == [len(path) for path in paths]
    assert found.last_row.tolist() == [b * levels + len(p) - 1 for b, p in enumerate(paths)]
    assert found.aux.shape == (batch, levels, WIDTH)
    for b, path in enumerate(paths):
        padding = levels - len(path)
        assert torch.equal(found.aux[b], torch.cat([aux[b, path], aux.new_zeros(padding, WIDTH)]))
        assert found.tokens[b].tolist() == [100 * b + r + 1 for r in path] + [0] * padding
        places = [past[b] + i for i in range(len(path))]
        assert found.positions[b].tolist() == places + [0] * padding
        pages = segments.pages[b].tolist()
        own = [-1 if b == missing else pages[p // PAGE] * PAGE + p % PAGE for p in places]
        assert found.slots[b].tolist() == own + [-1] * padding
    for x, wanted in zip(
        found, ("aux", "int64", "int32", "int64", "int32", "int64", "int32"), strict=True
    ):
        assert x.dtype == (dtype if wanted == "aux" else getattr(torch, wanted))
