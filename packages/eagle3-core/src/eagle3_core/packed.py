"""Linear layers packed for oneDNN, for targets and drafts that run on a CPU.

torch hands an fp32 weight to BLAS as it lies. With the one to eight rows that decoding and
verification ask for, that reaches a third of the memory bandwidth, and two rows cost almost twice
as much as one, which eats what speculation gains. oneDNN reorders the weight once; then a verify of
four rows costs what one row costs (SmolLM2-135M on two cores: 30 ms each, against 44 and 63 ms
unpacked).
"""

from collections.abc import Sequence

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

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], bias [out]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Plain attributes: an opaque layout belongs neither in a state dict nor through `.to()`.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)
        self._bias = None if bias is None else bias.detach()

    @property
    def weight(self) -> Tensor:
        """[out, in] in the plain layout: a fresh copy at every use, equal bit for bit."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def silu(self, x: Tensor) -> Tensor:
        """silu(linear(x)) in one call, rounded once."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "swish", [], "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """linear(x) + other [..., out] in one call, rounded once."""
        return self._with(x, other, "add")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """linear(x) * other [..., out] in one call, rounded once."""
        return self._with(x, other, "mul")

    def _with(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self._packed, self._bias, operation
        )


class PackedPart(nn.Module):
    """Some rows of a packed linear: one of several linears that were packed as one."""

    def __init__(self, whole: PackedLinear, first: int, end: int) -> None:
        super().__init__()
        self.in_features, self.out_features = whole.in_features, end - first
        # In a list, so that the whole is not a submodule of each of its parts.
        self._whole, self._rows = [whole], slice(first, end)

    @property
    def whole(self) -> PackedLinear:
        """The linear this one is part of."""
        return self._whole[0]

    @property
    def weight(self) -> Tensor:
        """As `PackedLinear.weight`."""
        return self.whole.weight[self._rows]

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self._rows]


def pack_as_one(parent: nn.Module, names: Sequence[str]) -> None:
    """Replace linears that read the same input by parts of one; all or none have a bias."""
    linears = [parent.get_submodule(name) for name in names]
    assert all(type(linear) is nn.Linear for linear in linears)
    biases = [linear.bias for linear in linears]
    whole = PackedLinear(
        torch.cat([linear.get_parameter("weight") for linear in linears]),
        None if biases[0] is None else torch.cat([b for b in biases if isinstance(b, Tensor)]),
    )
    first = 0
    for name, linear in zip(names, linears, strict=True):
        end = first + int(linear.get_parameter("weight").shape[0])
        setattr(parent, name, PackedPart(whole, first, end))
        first = end


def pack_linears(model: nn.Module) -> int:
    """Replace every plain fp32 or bf16 CPU `nn.Linear` below `model` in place; returns how many.

    The model can afterwards be run but not trained, saved or moved.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Exactly nn.Linear: a subclass may compute something else.
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
                count += 1
    return count
