"""Packed linears compute what nn.Linear computes, for any leading shape, with and without bias."""

import pytest
import torch
from torch import nn

from eagle3_core.packed import PackedLinear, is_packing_available, pack_linears

pytestmark = pytest.mark.skipif(not is_packing_available(), reason="this torch has no oneDNN")


@pytest.mark.parametrize("shape", [(1, 48), (4, 48), (33, 48), (2, 3, 48), (0, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias)
    x = torch.randn(shape)
    with torch.inference_mode():
        out = PackedLinear(linear)(x)
        expected = linear.double()(x.double())
    # fp32 sums of 48 products of order 0.1: rounding stays far below 1e-5.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_bfloat16_keeps_dtype() -> None:
    linear = nn.Linear(64, 32, bias=False).to(torch.bfloat16)
    x = torch.randn(5, 64).to(torch.bfloat16)
    with torch.inference_mode():
        out = PackedLinear(linear)(x)
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
