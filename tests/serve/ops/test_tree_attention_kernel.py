"""tree_attention against its reference: pages, trees, chains, chunks, windows, sinks, softcap."""

import pytest
import torch
from torch import Tensor

from eagle3_core.tree import ancestor_words
from eagle3_serve.ops.tree_attention import Segments
from eagle3_serve.ops.tree_attention import reference as plain
from eagle3_serve.ops.tree_attention import triton as fused

TREE = torch.tensor([-1, 0, 0, 1, 1, 2])
DEPTHS = torch.tensor([0, 1, 1, 2, 2, 2])


def a_batch(
    spans: list[tuple[int, int]], heads: tuple[int, int] = (4, 2), size: int = 16, page: int = 4
) -> tuple[Tensor, Tensor, Tensor, Segments]:
    """Queries, keys, values and segments; spans are (past, rows). Slots of no page hold NaN."""
    generator = torch.Generator().manual_seed(len(spans) + size)
    rows = sum(count for _, count in spans)
    longest = max(past + count for past, count in spans)
    num_pages = -(-longest // page)
    order = torch.randperm(len(spans) * num_pages + 2, generator=generator)
    pages = order[: len(spans) * num_pages].reshape(len(spans), num_pages).int()
    shape = heads[1], len(order) * page, size
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for b, (past, count) in enumerate(spans):
        index = torch.arange(past + count)
        slots = pages[b].long()[index // page] * page + index % page
        for store in (keys, values):
            store[:, slots] = torch.randn(heads[1], len(slots), size, generator=generator)
    counts = torch.tensor([count for _, count in spans], dtype=torch.int32)
    segments = Segments(
        first_row=(counts.cumsum(0) - counts).int(),
        num_rows=counts,
        past=torch.tensor([past for past, _ in spans], dtype=torch.int32),
        pages=pages,
        page_size=page,
        max_rows=int(counts.max()),
        max_length=longest,
    )
    return torch.randn(rows, heads[0], size, generator=generator), keys, values, segments


def assert_same(arguments: tuple, **options: object) -> None:
    found = fused.tree_attention(*arguments, 0.3, **options)
    expected = plain.tree_attention(*arguments, 0.3, **options)
    # fp32 sums of up to a thousand products in two orders.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 16), ((3, 3), 24), ((6, 1), 8)])
def test_chains_and_chunks(page: int, heads: tuple[int, int], size: int):
    assert_same(a_batch([(7, 1), (0, 5), (12, 4), (30, 20)], heads, size, page))


@pytest.mark.parametrize("options", [{"window": 5}, {"softcap": 2.0}, {"window": 1}])
def test_windows_and_softcaps(options: dict[str, float]):
    assert_same(a_batch([(9, 3), (0, 18), (40, 1)]), **options)


def test_sinks_take_weight_and_give_nothing():
    arguments = a_batch([(9, 3), (0, 2)])
    sinks = torch.tensor([0.5, -1.0, 3.0, 40.0])
    assert_same(arguments, sinks=sinks)
    assert fused.tree_attention(*arguments, 0.3, sinks=sinks)[:, 3].abs().max() < 1e-6


@pytest.mark.parametrize("window", [None, 4])
def test_a_tree_row_sees_its_ancestors_at_their_own_positions(window: int | None):
    spans = [(11, 6), (0, 6), (3, 6)]
    words = ancestor_words(TREE[None])[0, :, 0].repeat(3)
    positions = torch.stack([past + DEPTHS for past, _ in spans]).int()
    assert_same(a_batch(spans), words=words, positions=positions, window=window)


@pytest.mark.parametrize("window", [None, 4])
def test_a_tree_grows_level_by_level_beside_prompts(window: int | None):
    q, keys, values, segments = a_batch([(11, 6), (3, 6), (7, 70)])
    # The first two are trees whose first three rows an earlier pass has run.
    parts = [(0, 6), (6, 12), (12, 82)]
    kept = torch.cat([torch.arange(first + 3, end) for first, end in parts])
    words = torch.cat([ancestor_words(TREE[None])[0, 3:, 0].repeat(2), kept.new_zeros(67)])
    positions = torch.arange(73).repeat(3, 1).int() + segments.past[:, None]
    positions[:2, :6] = segments.past[:2, None] + DEPTHS.int()
    counts = segments.num_rows - 3
    segments = segments._replace(
        first_row=(counts.cumsum(0) - counts).int(), num_rows=counts, max_rows=67, grown=3
    )
    options = {"words": words, "positions": positions, "window": window}
    assert_same((q[kept], keys, values, segments), **options)


def test_rows_of_no_request_are_zeros():
    q, keys, values, segments = a_batch([(600, 2), (9, 1)])
    padded = torch.cat([q, torch.full_like(q, torch.nan)])
    found = fused.tree_attention(padded, keys, values, segments, 0.3)
    assert torch.equal(found[:3], fused.tree_attention(q, keys, values, segments, 0.3))
    assert torch.equal(found[3:], torch.zeros_like(q))


def test_a_tree_of_sixty_four_rows_uses_the_sign_bit():
    parents = torch.cat([torch.tensor([-1]), torch.arange(63)])[None]
    words = ancestor_words(parents)[0, :, 0]
    assert words[-1] < 0
    arguments = a_batch([(5, 64)])
    assert_same(arguments, words=words)
    chain = fused.tree_attention(*arguments, 0.3)
    torch.testing.assert_close(fused.tree_attention(*arguments, 0.3, words=words), chain)


def test_a_row_does_not_depend_on_who_shares_the_batch():
    q, keys, values, segments = a_batch([(600, 2), (9, 1), (0, 30)])
    together = fused.tree_attention(q, keys, values, segments, 0.3)
    alone = Segments(*(x[:1] for x in segments[:4]), segments.page_size, max_rows=2, max_length=602)
    assert torch.equal(fused.tree_attention(q[:2], keys, values, alone, 0.3), together[:2])


def test_half_precision():
    q, keys, values, segments = a_batch([(70, 4), (0, 9)])
    half = (q.bfloat16(), keys.bfloat16(), values.bfloat16(), segments)
    found = fused.tree_attention(*half, 0.3)
    # Weights in bf16 carry 2^-9 of relative error each, averaged over the row, and so does the
    # result's own rounding.
    torch.testing.assert_close(
        found.float(), plain.tree_attention(*half, 0.3).float(), rtol=2**-6, atol=2**-6
    )
