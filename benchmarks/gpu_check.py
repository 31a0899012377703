#!/usr/bin/env python
"""Everything that has to be seen on a GPU, in one run of under eight minutes.

    benchmarks/gpu_check.py [--out FILE.json] [--dry]

First every kernel against its reference, at the sizes of an 8B target and its draft; a kernel that
is wrong is not timed. Then what the machine can do (copy bandwidth, matrix products), and each
kernel's median time beside eager torch, torch.compile and the time its bytes take at that
bandwidth. Prints one JSON object, and writes it after every part, so that a run that is cut short
leaves what it has. `--dry` runs the same at tiny sizes on the CPU, in Triton's interpreter: it
proves the script, its times say nothing. Exits 1 if a kernel is wrong.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_cases import Case, Sizes, cases
from torch import Tensor

# Values that a bf16 op rounds once may differ by one step of 2^-8; two norms in a row, and sums of
# thousands of products in another order, make it a few.
RTOL, ATOL = 2**-5, 2**-5
BUDGET_SECONDS = 420.0
TINY = Sizes(
    hidden=64,
    intermediate=96,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=200,
    draft_vocab=100,
    context=20,
    page=4,
)


def differences(case: Case) -> str | None:
    """What differs between kernel and reference, or None."""
    found = _flat(case.call("triton")())
    expected = _flat(case.call("reference")())
    if len(found) != len(expected):
        return f"{len(found)} results, expected {len(expected)}"
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"result {i}: {one.dtype} {tuple(one.shape)}, expected {other.dtype}"
        if one.dtype.is_floating_point:
            close = torch.isclose(one.float(), other.float(), rtol=RTOL, atol=ATOL)
            if not close.all():
                gap = float((one.float() - other.float()).abs().max())
                return f"result {i}: {int((~close).sum())} of {one.numel()} differ, up to {gap}"
        # Ids may differ where logits tie within rounding: a few do, an error makes many.
        elif float((one != other).double().mean()) > 0.1:
            return f"result {i}: {int((one != other).sum())} of {one.numel()} ids differ"
    return None


def _flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [x for x in result if isinstance(x, Tensor)]


class Clock:
    """Milliseconds of a call: the median of graph replays on a GPU, one by the wall on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def median(self, call: Callable[[], Any]) -> float:
        """Of one call."""
        if self._on_gpu:
            median = triton.testing.do_bench_cudagraph(call, return_mode="median")
            assert isinstance(median, float)
            return median
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3


def ceilings(clock: Clock, device: torch.device, dry: bool) -> dict[str, float]:
    """What the machine can do: bytes read and written a second, and FLOP a second in bf16."""
    count, size = (2**16, 64) if dry else (2**29, 8192)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    copy = clock.median(lambda: goal.copy_(source))
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product = clock.median(lambda: a @ a)
    return {
        "copy_gb_per_s": 2 * count / copy / 1e6,
        "bf16_tflop_per_s": 2 * size**3 / product / 1e9,
    }


def timed(case: Case, clock: Clock, bandwidth: float, dry: bool) -> dict[str, float | str]:
    """Medians of the kernel and what it stands beside."""
    floor = case.moved / bandwidth / 1e6
    kernel, eager = case.call("triton"), case.call("reference")
    row: dict[str, float | str] = {"floor_ms": floor}
    row["triton_ms"] = clock.median(kernel)
    row["share_of_copy_bandwidth"] = floor / float(row["triton_ms"])
    for name, call in (("eager_ms", eager), ("compile_ms", None if dry else torch.compile(eager))):
        if call is None:
            continue
        try:
            row[name] = clock.median(call)
        except Exception as error:
            # References that ask the device (the walk of verify) cannot be captured.
            row[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return row


def environment(device: torch.device) -> dict[str, str]:
    """What the figures belong to."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    return {
        "device": name or device.type,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
    }


def main() -> int:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry", action="store_true", help="tiny sizes in the interpreter")
    args = parser.parse_args()
    began = time.monotonic()
    if args.dry and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton reads it when it is imported, which has happened.
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if not args.dry and not torch.cuda.is_available():
        print("gpu_check: there is no GPU here; --dry runs without one", file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.dry else "cuda")
    torch.manual_seed(0)
    result: dict[str, Any] = {"environment": environment(device), "dry": args.dry}

    def keep(part: str, value: Any) -> None:
        result[part] = value
        result["seconds"] = round(time.monotonic() - began, 1)
        if args.out is not None:
            work = args.out.with_suffix(".part")
            work.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            work.replace(args.out)

    batches = [2] if args.dry else [1, 8, 64]
    made = {rows: cases(device, TINY if args.dry else Sizes(), rows) for rows in batches}
    wrong = {
        f"{name}, {rows} rows": difference
        for rows, group in made.items()
        for name, case in group.items()
        if (difference := differences(case)) is not None
    }
    keep("wrong", wrong)
    clock = Clock(device)
    keep("ceilings", ceilings(clock, device, args.dry))
    figures: dict[str, Any] = {}
    for rows, group in made.items():
        for name, case in group.items():
            label = f"{name}, {rows} rows"
            if label in wrong or time.monotonic() - began > BUDGET_SECONDS:
                continue
            figures[label] = timed(case, clock, result["ceilings"]["copy_gb_per_s"], args.dry)
            keep("kernels", figures)
    print(json.dumps(result, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
