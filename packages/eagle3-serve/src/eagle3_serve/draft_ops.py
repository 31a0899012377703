"""The draft's fusion points on the Triton kernels."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from eagle3_core import TorchOps
from eagle3_core.attention import AttentionContext
from eagle3_core.ops import TokenEmbeddings
from eagle3_serve.attention import Attention
from eagle3_serve.joined import joined
from eagle3_serve.ops.add_rms_norm.triton import add_rms_norm
from eagle3_serve.ops.draft_input.triton import draft_input
from eagle3_serve.ops.swiglu.triton import swiglu
from eagle3_serve.paged import PagedContext


class TritonOps(TorchOps):
    """For rows [1,R,...] over a `PagedContext`, without gradients."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(None, x.flatten(0, -2), weight, eps)[1].view(x.shape)

    def norm_concat(
        self,
        e: Tensor | TokenEmbeddings,
        e_weight: Tensor,
        x: Tensor,
        x_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        if isinstance(e, Tensor):
            return super().norm_concat(e, e_weight, x, x_weight, eps)
        rows = x.flatten(0, -2)
        both, normed = draft_input(e.ids.flatten(), e.table, rows, e_weight, x_weight, eps)
        return both.view(*x.shape[:-1], -1), normed.view(x.shape)

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, normed = add_rms_norm(residual.flatten(0, -2), delta.flatten(0, -2), weight, eps)
        return total.view(delta.shape), normed.view(delta.shape)

    def linears(self, x: Tensor, parts: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        weight, bias, sizes = joined(parts)
        return F.linear(x, weight, bias).split(sizes, -1)

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
        assert isinstance(context, PagedContext)
        how = Attention(q.shape[-1] ** -0.5, context.sliding_window)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        mixed = context.attend_unrotated(layer, q, k, v, cos[0], sin[0], how)
        return mixed.transpose(0, 1)[None]

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)
