"""A head in float8, half the bytes: it changes what is proposed, never what is emitted."""

import torch
from torch import Tensor


def quantised_head(head: Tensor) -> tuple[Tensor, Tensor]:
    """[D,H] -> its float8_e4m3fn rows and their fp32 scales [D], for `draft_head`."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = head.float().abs().amax(1).clamp(min=1e-12) / largest
    return (head.float() / scale[:, None]).to(torch.float8_e4m3fn), scale
