"""Linears that read the same input, as one: their weights become neighbours in memory.

The modules stay what they were, over the same memory, so the model's own code still runs.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn


@torch.no_grad()
def join(parts: Sequence[nn.Module]) -> None:
    """Move the weights of plain linears side by side, and their biases; once is enough."""
    for name in ("weight", "bias"):
        own = [getattr(part, name) for part in parts]
        if own[0] is None or _are_neighbours(own):
            continue
        whole = torch.cat([parameter.detach() for parameter in own])
        for parameter, piece in zip(own, whole.split([len(p) for p in own]), strict=True):
            parameter.data = piece


def joined(parts: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None, list[int]]:
    """Weight [sum of out, in], bias and the widths of linears that were joined; no copies."""
    linears = [cast(nn.Linear, part) for part in parts]
    sizes = [len(linear.weight) for linear in linears]
    first, bias = linears[0].weight, linears[0].bias
    whole = first.as_strided((sum(sizes), first.shape[1]), first.stride())
    return whole, None if bias is None else bias.as_strided((sum(sizes),), (1,)), sizes


def _are_neighbours(parameters: Sequence[Tensor]) -> bool:
    first = parameters[0]
    end = first.data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or parameter.data_ptr() != end or not parameter.is_contiguous():
            return False
        end += parameter.nbytes
    return True
