"""Packed linears compute what nn.Linear computes, for any leading shape, with and without bias."""

import pytest
import torch
from torch import nn

from eagle3_core.packed import PackedLinear, is_packing_available, pack_as_one, pack_linears

pytestmark = pytest.mark.skipif(not is_packing_available(), reason="this torch has no oneDNN")


@pytest.mark.parametrize("shape", [(1, 48), (4, 48), (33, 48), (2, 3, 48), (0, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias)
    x = torch.randn(shape)
    with torch.inference_mode():
        out = PackedLinear(linear.weight, linear.bias)(x)
        expected = linear.double()(x.double())
    # fp32 sums of 48 products of order 0.1: rounding stays far below 1e-5.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_bfloat16_keeps_dtype() -> None:
    linear = nn.Linear(64, 32, bias=False).to(torch.bfloat16)
    x = torch.randn(5, 64).to(torch.bfloat16)
    with torch.inference_mode():
        out = PackedLinear(linear.weight, linear.bias)(x)
    assert out.dtype == torch.bfloat16
    # One bf16 rounding of a sum whose terms are below 1: half a unit in the eighth bit.
    torch.testing.assert_close(
        out.float(), x.float() @ linear.weight.float().T, rtol=2**-8, atol=2**-8
    )


def test_pack_linears_leaves_subclasses_and_tied_embeddings_alone() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Module()
    model.embed = nn.Embedding(80, 48)
    model.head = nn.Linear(48, 80, bias=False)
    model.head.weight = model.embed.weight
    model.block = nn.Sequential(nn.Linear(48, 48), Doubling(48, 48))
    before = model.embed.weight.clone()
    with torch.inference_mode():
        x = torch.randn(3, 48)
        expected = model.head(model.block(x))
        assert pack_linears(model) == 2
        assert isinstance(model.head, PackedLinear)
        assert type(model.block[1]) is Doubling
        torch.testing.assert_close(model.head(model.block(x)), expected, rtol=0, atol=1e-5)
    assert torch.equal(model.embed.weight, before)


def test_linears_packed_as_one_are_what_they_were() -> None:
    torch.manual_seed(0)
    for bias in (False, True):
        parent = nn.Module()
        parent.q, parent.k = nn.Linear(24, 16, bias=bias), nn.Linear(24, 8, bias=bias)
        x = torch.randn(5, 24)
        expected, weights = [parent.q(x), parent.k(x)], [parent.q.weight, parent.k.weight]
        pack_as_one(parent, ("q", "k"))
        for part, out, weight in zip((parent.q, parent.k), expected, weights, strict=True):
            # Sums of 24 products in another order.
            torch.testing.assert_close(part(x), out, rtol=0, atol=1e-6)
            assert torch.equal(part.weight, weight)


def test_what_rides_on_a_linear_is_what_it_would_be_alone() -> None:
    torch.manual_seed(0)
    packed, x, other = PackedLinear(torch.randn(16, 24)), torch.randn(5, 24), torch.randn(5, 16)
    plain = packed(x)
    for found, expected in (
        (packed.silu(x), nn.functional.silu(plain)),
        (packed.plus(x, other), plain + other),
        (packed.times(x, other), plain * other),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
