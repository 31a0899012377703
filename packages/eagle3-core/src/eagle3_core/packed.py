"""Linear layers packed for oneDNN, for targets and drafts that run on a CPU.

torch hands an fp32 weight to BLAS as it lies. With the one to eight rows that decoding and
verification ask for, that reaches a third of the memory bandwidth, and two rows cost almost twice
as much as one, which eats what speculation gains. oneDNN reorders the weight once; then a verify of
four rows costs what one row costs (SmolLM2-135M on two cores: 30 ms each, against 44 and 63 ms
unpacked).
"""

import torch
from torch import Tensor, nn

# The row count the layout is chosen for: the middle of what a verify of a short chain holds.
_PACKED_FOR_ROWS = 4


def is_packing_available() -> bool:
    """Whether this build of torch carries oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def can_pack(weight: Tensor) -> bool:
    """Whether a layer with this weight may become a `PackedLinear`."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """Inference-only replacement of `nn.Linear` on a CPU: [..., in] -> [..., out], fp32 or bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        # Plain attributes: an opaque layout belongs neither in a state dict nor through `.to()`.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._bias: Tensor | None = None if linear.bias is None else linear.bias.detach()

    @property
    def weight(self) -> Tensor:
        """[out, in] in the plain layout: a fresh copy at every use, equal bit for bit."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def pack_linears(model: nn.Module) -> int:
    """Replace every plain fp32 or bf16 CPU `nn.Linear` below `model` in place; returns how many.

    The model can afterwards be run but not trained, saved or moved.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Exactly nn.Linear: a subclass may compute something else.
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
