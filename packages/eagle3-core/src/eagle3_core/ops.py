"""The draft's fusion points, and their plain torch reference.

A provider of fused kernels implements `DraftOps` and hands it to `Eagle3Draft(config, ops=...)`;
the module itself stays the same. Norms compute in fp32 (fp64 for fp64 inputs) and return the
input's dtype.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_core.attention import AttentionContext


class TokenEmbeddings(NamedTuple):
    """Embeddings that nobody has gathered yet: an op can norm them as it reads them."""

    ids: Tensor  # [...] int64
    table: Tensor  # [V,H]


class DraftOps(Protocol):
    """What `Eagle3Draft` asks of a kernel provider. `...` stands for any leading shape."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., H] -> [..., H]."""
        ...

    def norm_concat(
        self,
        e: Tensor | TokenEmbeddings,
        e_weight: Tensor,
        x: Tensor,
        x_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """[..., H] twice -> (cat[norm(e), norm(x)] [..., 2H], norm(x)). Embedding first."""
        ...

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """-> (residual + delta, norm of that sum)."""
        ...

    def linears(self, x: Tensor, parts: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """What several linears make of one input [..., H]."""
        ...

    def rope_attend(
        self,
        context: AttentionContext,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """`context.attend` of rotated halves: q [B,n,S,d], k and v [B,m,S,d], cos and sin [B,S,d].

        Returns:
            [B,n,S,d].
        """
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        ...

    def draft_head(self, h: Tensor, norm_weight: Tensor, eps: float, head: Tensor) -> Tensor:
        """norm(h) @ head.T: [..., H] -> [..., D]."""
        ...


class TorchOps:
    """Reference implementation of `DraftOps`; differentiable."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def norm_concat(
        self,
        e: Tensor | TokenEmbeddings,
        e_weight: Tensor,
        x: Tensor,
        x_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        if isinstance(e, TokenEmbeddings):
            e = F.embedding(e.ids, e.table)
        normed = self.rms_norm(x, x_weight, eps)
        return torch.cat([self.rms_norm(e, e_weight, eps), normed], dim=-1), normed

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return total, self.rms_norm(total, weight, eps)

    def linears(self, x: Tensor, parts: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        return tuple(part(x) for part in parts)

    def rope_attend(
        self,
        context: AttentionContext,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        q, k = self.rope(q, k, cos, sin)
        return context.attend(layer, q, k, v)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate halves: q [B,n,S,d], k [B,m,S,d], cos and sin [B,S,d]."""
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def draft_head(self, h: Tensor, norm_weight: Tensor, eps: float, head: Tensor) -> Tensor:
        return F.linear(self.rms_norm(h, norm_weight, eps), head)


def _rotate_half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)
