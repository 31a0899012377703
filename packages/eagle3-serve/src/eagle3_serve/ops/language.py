"""What the kernels share: rounding as torch rounds, and what Triton's interpreter cannot do itself.

The interpreter truncates where a conversion to bfloat16 should round to nearest even, and
multiplies bfloat16 matrices wrongly. Kernels compute in fp32 and convert here, so that what is
tested without a GPU is what runs on one.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 -> `dtype`, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        # NaN stays NaN: adding could carry into the sign.
        bits = tl.where(x != x, bits, even) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def rounded_fp32(x, dtype: tl.constexpr):
    """fp32 -> the nearest value that `dtype` can hold, still as fp32."""
    return rounded(x, dtype).to(tl.float32)


@triton.jit
def operand(x):
    """What a matrix product takes: the tile as it is, or in fp32 under the interpreter."""
    if INTERPRETED:
        return x.to(tl.float32)
    return x


@triton.jit
def rms_normed(x, weight, size, eps, dtype: tl.constexpr):
    """A row's RMSNorm, fp32 in and out, rounded where `TorchOps.rms_norm` rounds.

    x: [BLOCK] fp32 values of `dtype`, zeros behind `size`; weight: [BLOCK].
    """
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    return rounded_fp32(rounded_fp32(x * scale, dtype) * weight.to(tl.float32), dtype)
