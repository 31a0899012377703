"""Row-wise kernels against their references: same rounding, so equal or one step of the dtype off.

The one step: fp32 sums of squares may differ in their last bit between two orders of summation,
and a value next to a rounding border then falls to its other side. A second rounding on top (the
weight, a second norm) can add another.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagle3_serve.ops.add_rms_norm import reference as add_rms_norm_reference
from eagle3_serve.ops.add_rms_norm import triton as add_rms_norm_triton
from eagle3_serve.ops.aux_states import reference as aux_states_reference
from eagle3_serve.ops.aux_states import triton as aux_states_triton
from eagle3_serve.ops.draft_input import reference as draft_input_reference
from eagle3_serve.ops.draft_input import triton as draft_input_triton
from eagle3_serve.ops.rope_kv import reference as rope_kv_reference
from eagle3_serve.ops.rope_kv import triton as rope_kv_triton
from eagle3_serve.ops.swiglu import reference as swiglu_reference
from eagle3_serve.ops.swiglu import triton as swiglu_triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
DRAW = Callable[..., Tensor]


@pytest.fixture
def draw() -> DRAW:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw


def strided(x: Tensor) -> Tensor:
    """The same values as rows of a wider tensor whose other columns are NaN."""
    wide = torch.full((len(x), x.shape[1] + 3), torch.nan, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def assert_rounded_alike(found: Tensor, expected: Tensor, steps: int = 2) -> None:
    """At most `steps` units in the last place apart; fp32 has many small roundings, and gets 16."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    steps = 16 if found.dtype == torch.float32 else steps
    torch.testing.assert_close(
        found, expected, rtol=steps * torch.finfo(found.dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 33), (0, 16), (3, 1)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_add_rms_norm(draw: DRAW, dtype: torch.dtype, rows: int, size: int, has_residual: bool):
    residual = strided(draw(rows, size, dtype=dtype)) if has_residual else None
    arguments = (residual, strided(draw(rows, size, dtype=dtype)), draw(size, dtype=dtype), EPS)
    found = add_rms_norm_triton.add_rms_norm(*arguments)
    expected = add_rms_norm_reference.add_rms_norm(*arguments)
    assert torch.equal(found[0], expected[0])
    assert_rounded_alike(found[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (4, 1500), (0, 16)])
def test_swiglu(draw: DRAW, dtype: torch.dtype, rows: int, size: int):
    both = draw(rows, 2 * size, dtype=dtype) * 4
    gate, up = both.chunk(2, -1)
    assert_rounded_alike(swiglu_triton.swiglu(gate, up), swiglu_reference.swiglu(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 6, 0])
@pytest.mark.parametrize("shifted", [True, False])
def test_draft_input(draw: DRAW, dtype: torch.dtype, rows: int, shifted: bool):
    size, vocab = 40, 50
    ids = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(1))
    # Two segments: rows 0..2 and 3..5, each ending in a token of its own.
    tails = torch.tensor([-1, -1, 7, -1, -1, 9])[-rows:] if rows else torch.empty(0).long()
    arguments = (
        ids,
        draw(vocab, size, dtype=dtype),
        strided(draw(rows, size, dtype=dtype)),
        draw(size, dtype=dtype),
        draw(size, dtype=dtype),
        EPS,
        tails if shifted else None,
    )
    found = draft_input_triton.draft_input(*arguments)
    expected = draft_input_reference.draft_input(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert_rounded_alike(one, other)


def test_a_shifted_row_takes_the_next_token_and_the_last_of_a_segment_its_tail():
    embedding = torch.eye(8)
    ids, tails = torch.tensor([1, 2, 3, 4]), torch.tensor([-1, 6, -1, 7])
    ones = torch.ones(8)
    arguments = (ids, embedding, torch.zeros(4, 8), ones, ones, EPS, tails)
    for module in (draft_input_reference, draft_input_triton):
        out, _ = module.draft_input(*arguments)
        assert out[:, :8].argmax(-1).tolist() == [2, 6, 4, 7]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "states"), [(1, 1), (3, 3), (2, 5), (0, 3)])
@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("per_layer", [True, False])
def test_aux_states(
    draw: DRAW, dtype: torch.dtype, rows: int, states: int, concat: bool, per_layer: bool
):
    size = 24
    parts = [strided(draw(rows, size, dtype=dtype)) * (i + 1) for i in range(states)]
    arguments = (
        parts,
        draw(states * size, dtype=dtype) if concat else None,
        draw(states, size, dtype=dtype) if per_layer else None,
        EPS,
    )
    found = aux_states_triton.aux_states(*arguments)
    assert_rounded_alike(found, aux_states_reference.aux_states(*arguments), steps=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "num_q", "num_kv", "size"), [(1, 4, 2, 16), (5, 3, 3, 12)])
def test_rope_kv(draw: DRAW, dtype: torch.dtype, rows: int, num_q: int, num_kv: int, size: int):
    fused = draw(rows, (num_q + 2 * num_kv) * size, dtype=dtype)
    q, k, v = (
        part.unflatten(-1, (-1, size))
        for part in fused.split([num_q * size, num_kv * size, num_kv * size], -1)
    )
    angle = torch.arange(rows)[:, None] * torch.arange(size // 2)[None] / 7
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
    slots = torch.tensor([9, 2, -1, 4, 0])[:rows]
    stores = []
    for module in (rope_kv_triton, rope_kv_reference):
        keys = torch.full((num_kv, 10, size), torch.nan, dtype=dtype)
        values = keys.clone()
        stores.append((module.rope_kv(q, k, v, cos, sin, slots, keys, values), keys, values))
    for found, expected in zip(*stores, strict=True):
        # Slots that no row names stay NaN in both.
        assert torch.equal(found.isnan(), expected.isnan())
        assert_rounded_alike(found.nan_to_num(), expected.nan_to_num())
