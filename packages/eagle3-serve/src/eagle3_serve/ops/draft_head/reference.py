"""Torch reference of draft_head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_core import TorchOps
from eagle3_serve.ops.draft_head import Proposals


def draft_head(
    h: Tensor,
    norm_weight: Tensor,
    eps: float,
    head: Tensor,
    k: int,
    d2t: Tensor | None = None,
    head_scale: Tensor | None = None,
) -> Proposals:
    """The k most likely tokens after each hidden state.

    Args:
        h: [R,H] before the final norm.
        norm_weight: [H].
        eps: of the norm.
        head: [D,H]; in float8_e4m3fn if `head_scale` is given.
        k: proposals a row, 1 to 16.
        d2t: [D] offsets to target ids, when the draft's vocabulary is pruned.
        head_scale: [D] fp32, what each quantised row of the head is multiplied by.
    """
    normed = TorchOps().rms_norm(h, norm_weight, eps)
    logits = F.linear(normed, head.to(normed.dtype)).float()
    if head_scale is not None:
        logits = logits * head_scale
    # A stable sort, for torch.topk promises nothing about ties.
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :k], ids[:, :k]
    log_probs = values - torch.logsumexp(logits, -1, keepdim=True)
    return Proposals(ids if d2t is None else ids + d2t[ids], ids, log_probs)
