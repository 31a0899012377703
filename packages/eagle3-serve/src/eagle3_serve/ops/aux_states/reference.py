"""Torch reference of aux_states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_core import TorchOps


def aux_states(
    states: Sequence[Tensor], concat_weight: Tensor | None, layer_weights: Tensor | None, eps: float
) -> Tensor:
    """A captured states in one buffer, with the norms that stand before `fc`.

    Args:
        states: A times [R,T], in ascending depth; rows may be strided.
        concat_weight: [A·T] of one RMSNorm over all of them (`input_norm`), which comes first.
        layer_weights: [A,T] of one RMSNorm per state (`fc_norm`).
        eps: of the norms.

    Returns:
        [R,A·T].
    """
    aux, ops = torch.cat(list(states), -1), TorchOps()
    if concat_weight is not None:
        aux = ops.rms_norm(aux, concat_weight, eps)
    if layer_weights is not None:
        parts = aux.unflatten(-1, (len(states), -1))
        aux = ops.rms_norm(parts, layer_weights, eps).flatten(-2)
    return aux
