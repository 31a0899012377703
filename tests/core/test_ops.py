"""The torch reference of the draft's fusion points, one scalar formula at a time."""

import math

import pytest
import torch
from torch import Tensor

from eagle3_core import TorchOps

OPS = TorchOps()
EPS = 1e-2  # large enough to show in the result


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def norm_by_hand(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    out = torch.empty_like(x, dtype=torch.float64)
    for row, values in zip(out.view(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]), strict=True):
        scale = math.sqrt(sum(float(value) ** 2 for value in values) / len(values) + eps)
        for i, value in enumerate(values):
            row[i] = float(value) / scale * float(weight[i])
    return out


def test_rms_norm() -> None:
    x, weight = normal(2, 3, 5), normal(5, seed=1)
    torch.testing.assert_close(OPS.rms_norm(x, weight, EPS), norm_by_hand(x, weight))
    zeros = OPS.rms_norm(torch.zeros(1, 5), torch.ones(5), 1e-6)
    assert not zeros.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_adds_up_in_fp32(dtype: torch.dtype) -> None:
    """1000 squares of 8 exceed what fp16 holds, and bf16 sums would stall long before."""
    x, ones = torch.full((1, 1000), 8.0, dtype=dtype), torch.ones(1000, dtype=dtype)
    out = OPS.rms_norm(x, ones, 1e-6)
    assert out.dtype == dtype
    assert torch.equal(out, torch.ones(1, 1000, dtype=dtype))


def test_rms_norm_rounds_once_before_the_weight() -> None:
    """As the targets' own Llama norms do, so that converted weights see the same numbers."""
    x, weight = normal(4, 64, dtype=torch.bfloat16), normal(64, seed=1, dtype=torch.bfloat16)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    assert torch.equal(OPS.rms_norm(x, weight, EPS), wide.bfloat16() * weight)


def test_norm_concat_puts_the_embedding_first() -> None:
    e, x = normal(2, 3, 6), normal(2, 3, 6, seed=1)
    e_weight, x_weight = normal(6, seed=2), normal(6, seed=3)
    both, normed = OPS.norm_concat(e, e_weight, x, x_weight, EPS)
    torch.testing.assert_close(both[..., :6], norm_by_hand(e, e_weight))
    torch.testing.assert_close(both[..., 6:], norm_by_hand(x, x_weight))
    assert torch.equal(normed, both[..., 6:])
    assert both.shape == (2, 3, 12)


def test_add_rms_norm_returns_the_plain_sum_too() -> None:
    residual, delta, weight = normal(2, 6), normal(2, 6, seed=1), normal(6, seed=2)
    total, normed = OPS.add_rms_norm(residual, delta, weight, EPS)
    assert torch.equal(total, residual + delta)
    torch.testing.assert_close(normed, norm_by_hand(residual + delta, weight))


def test_rope_turns_the_pair_i_and_i_plus_half() -> None:
    """Halves, not neighbours: the layout of Hugging Face checkpoints."""
    q, k = normal(2, 4, 3, 6), normal(2, 1, 3, 6, seed=1)
    angles = normal(2, 3, 3, seed=2)
    table = torch.cat([angles, angles], dim=-1)
    rotated = OPS.rope(q, k, table.cos(), table.sin())
    for x, out in zip((q, k), rotated, strict=True):
        pairs = torch.complex(x[..., :3], x[..., 3:])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        torch.testing.assert_close(out, torch.cat([turned.real, turned.imag], dim=-1))


def test_swiglu() -> None:
    gate, up = normal(2, 5), normal(2, 5, seed=1)
    torch.testing.assert_close(OPS.swiglu(gate, up), gate / (1 + (-gate).exp()) * up)


def test_draft_head_norms_then_multiplies() -> None:
    h, weight, head = normal(2, 3, 6), normal(6, seed=1), normal(9, 6, seed=2)
    expected = torch.einsum("bsh,dh->bsd", norm_by_hand(h, weight), head)
    torch.testing.assert_close(OPS.draft_head(h, weight, EPS, head), expected)
