"""States in eight bits: float8 e4m3, and a power of two for each token and state.

For what the draft reads, not for the state its teacher is made of: there the same rounding changes
which token the target prefers at one position in twenty.

A power of two costs a float nothing, so a decoded number is exact in bfloat16 (four significant
bits), and encoding what was decoded gives the same bytes. States whose largest channel is 2^16
times another's lose that one; relative to the largest, the error is at most 2^-4.
"""

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
_TOP = 8  # the largest number of a row comes to lie in (2^7, 2^8]; e4m3 ends at 448


def encode(states: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """[S,A·width] -> [S,A·width] float8 and [S,A] int8 exponents of the scales.

    Numbers that are not finite stay that: inf becomes NaN, which e4m3 has.
    """
    rows = states.float().unflatten(-1, (-1, width))
    mantissa, exponent = torch.frexp(rows.abs().amax(-1))  # mantissa in [1/2,1)
    # One that rounds up to the next power of two is of that power: what is decoded encodes alike.
    exponent = exponent + ((mantissa * 2**_TOP).to(DTYPE).float() == 2**_TOP) - _TOP
    exponent = exponent.clamp(-126, 127).to(torch.int8)
    scaled = torch.ldexp(rows, -exponent[..., None].int())
    return scaled.to(DTYPE).flatten(-2), exponent


def decode(values: Tensor, exponent: Tensor) -> Tensor:
    """The inverse, [S,A·width] bfloat16."""
    rows = values.float().unflatten(-1, (exponent.shape[-1], -1))
    return torch.ldexp(rows, exponent[..., None].int()).flatten(-2).to(torch.bfloat16)


def rounded(states: Tensor, width: int) -> Tensor:
    """What a store in this format gives back, [S,A·width] bfloat16."""
    return decode(*encode(states, width))
