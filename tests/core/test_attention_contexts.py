"""The two attention contexts against one naive rule: which keys may slot t see, one by one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagle3_core import CacheContext, UnrollContext

BATCH, SLOTS, STEPS, KV_HEADS, HEAD_DIM = 2, 7, 4, 2, 6
DOCUMENTS = torch.tensor([[3, 3, 3, 3, 8, 8, 8], [0, 1, 1, 5, 5, 5, 5]])
WINDOWS = [None, 1, 2, 3, 20]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    # Both sides are float64 sums of a few dozen terms of order one.
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def random_qkv(slots: int, groups: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        size = (BATCH, heads, slots, HEAD_DIM)
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return normal(KV_HEADS * groups), normal(KV_HEADS), normal(KV_HEADS)


def attend_one(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """q [nq,d], lists of [nkv,d] -> [nq,d]: consecutive query heads share a kv head."""
    groups = len(q) // KV_HEADS
    out = torch.zeros_like(q)
    for head, query in enumerate(q):
        scores = torch.stack([query @ k[head // groups] for k in keys])
        weights = (scores / HEAD_DIM**0.5).softmax(0)
        for weight, value in zip(weights, values, strict=True):
            out[head] += weight * value[head // groups]
    return out


def each_slot(function: Callable[[int, int], Tensor]) -> Tensor:
    """function(row, slot) -> [nq,d], stacked to [B,nq,S,d]."""
    rows = [torch.stack([function(b, t) for t in range(SLOTS)], dim=1) for b in range(BATCH)]
    return torch.stack(rows)


def naive_causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    def slot(b: int, t: int) -> Tensor:
        seen = [j for j in range(t + 1) if window is None or t - j < window]
        return attend_one(q[b, :, t], [k[b, :, j] for j in seen], [v[b, :, j] for j in seen])

    return each_slot(slot)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 1, 2, 1]], ids=str)
def test_cache_is_causal_however_it_is_cut(
    window: int | None, groups: int, pieces: list[int]
) -> None:
    q, k, v = random_qkv(SLOTS, groups)
    context = CacheContext(window)
    parts = zip(*(x.split(pieces, dim=2) for x in (q, k, v)), strict=True)
    actual = torch.cat([context.attend(0, *part) for part in parts], dim=2)
    assert_same(actual, naive_causal(q, k, v, window))


def test_cache_keeps_layers_apart() -> None:
    context = CacheContext()
    first, second = random_qkv(SLOTS, 1, seed=1), random_qkv(SLOTS, 1, seed=2)
    for t in range(SLOTS):
        for layer, qkv in ((0, first), (1, second)):
            out = context.attend(layer, *(x[:, :, t : t + 1] for x in qkv))
            expected = naive_causal(*qkv, None)[:, :, t : t + 1]
            assert_same(out, expected)
    assert context.length == SLOTS


@pytest.mark.parametrize("window", [None, 3])
def test_truncate_forgets_in_every_layer(window: int | None) -> None:
    q, k, v = random_qkv(SLOTS, 2)
    wrong = random_qkv(3, 2, seed=9)
    context = CacheContext(window)
    assert context.length == 0
    for layer in (0, 1):
        context.attend(layer, q[:, :, :4], k[:, :, :4], v[:, :, :4])
    for layer in (0, 1):
        context.attend(layer, *wrong)
    assert context.length == 7
    context.truncate(4)
    assert context.length == 4
    expected = naive_causal(q, k, v, window)[:, :, 4:]
    for layer in (0, 1):
        out = context.attend(layer, q[:, :, 4:], k[:, :, 4:], v[:, :, 4:])
        assert_same(out, expected)
    context.truncate(0)
    assert context.length == 0
    out = context.attend(0, q, k, v)
    assert_same(out, naive_causal(q, k, v, window))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "packed"])
def test_unroll_sees_the_past_of_step_0_and_its_own_chain(
    window: int | None, groups: int, documents: Tensor | None
) -> None:
    """At step k slot t stands at position t + k; step 0's slot j at j, its own step i at t + i."""
    context = UnrollContext(documents, window)
    history = []
    for k in range(STEPS):
        history.append(random_qkv(SLOTS, groups, seed=k))

        def slot(b: int, t: int, k: int = k) -> Tensor:
            row = torch.zeros(SLOTS) if documents is None else documents[b]
            seen = [(0, j) for j in range(t + 1) if row[j] == row[t]]
            seen += [(i, t) for i in range(1, k + 1)]
            if window is not None:
                seen = [(i, j) for i, j in seen if t + k - (i + j) < window]
            keys = [history[i][1][b, :, j] for i, j in seen]
            values = [history[i][2][b, :, j] for i, j in seen]
            return attend_one(history[k][0][b, :, t], keys, values)

        assert_same(context.attend(0, *history[k]), each_slot(slot))


def test_unroll_keeps_layers_apart() -> None:
    both, alone = UnrollContext(), UnrollContext()
    for k in range(3):
        other, qkv = random_qkv(SLOTS, 1, seed=50 + k), random_qkv(SLOTS, 1, seed=k)
        both.attend(0, *other)
        assert torch.equal(both.attend(1, *qkv), alone.attend(0, *qkv))


def test_unroll_gradients_stay_finite_where_a_window_hides_all_of_step_0() -> None:
    context = UnrollContext(DOCUMENTS, sliding_window=2)
    inputs = [tuple(x.requires_grad_() for x in random_qkv(SLOTS, 2, seed=k)) for k in range(STEPS)]
    outputs = [context.attend(0, *qkv) for qkv in inputs]
    outputs[-1].sum().backward()
    last, first = inputs[-1], inputs[0]
    assert last[2].grad is not None
    assert last[2].grad.isfinite().all()
    assert last[2].grad.abs().sum() > 0
    assert first[2].grad is not None
    assert not first[2].grad.any()  # three steps on, step 0 is out of a window of two


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_contexts_return_the_dtype_of_the_values(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in random_qkv(SLOTS, 2))
    unroll = UnrollContext(DOCUMENTS)
    assert CacheContext().attend(0, q, k, v).dtype == dtype
    assert [unroll.attend(0, q, k, v).dtype for _ in range(2)] == [dtype, dtype]
