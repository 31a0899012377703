#!/usr/bin/env python
"""Compile every Triton kernel as it is launched, for GPUs that need not be there.

    benchmarks/compile_kernels.py [--arch 80 --arch 90 ...]

The ops' own functions are called on tensors without data, at the sizes of an 8B target and its
draft; what they would launch is compiled. Prints one JSON object: for each kernel and architecture
the registers a thread, the bytes it spills and the shared memory of a block, as the compiler
reports them. Exits 1 if a kernel spills or asks for more shared memory than a block can have.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_cases import cases
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

# Shared memory that one block can be given, bytes (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas")


class Launch:
    """One launch as the op's function asked for it."""

    def __init__(self, kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kernel = kernel
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        self.options = {k: v for k, v in values.items() if k in _OPTIONS}
        self.signature: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for parameter in kernel.params:
            name, value = parameter.name, values[parameter.name]
            # As triton specialises a launch: the number 1, and what 16 divides, are known.
            if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
                self.signature[name], self.constants[name] = "constexpr", value
                continue
            self.signature[name] = _type_of(value)
            if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
                self.attributes[(parameter.num,)] = [["tt.divisibility", 16]]

    @property
    def key(self) -> str:
        """Equal for launches that compile to the same code."""
        parts = self.signature, self.constants, self.attributes, self.options
        return f"{self.kernel.__name__} {parts}"

    def can_run(self, arch: int) -> bool:
        """Whether the GPU has the types: float8_e4m3 came with sm_89."""
        return arch >= 89 or "*fp8e4nv" not in self.signature.values()

    def compile(self, arch: int) -> dict[str, int]:
        """Registers a thread, spilled bytes a thread and shared bytes a block."""
        source = ASTSource(
            fn=self.kernel,
            signature=self.signature,
            constexprs={(self.kernel.arg_names.index(k),): v for k, v in self.constants.items()},
            attrs=self.attributes,
        )
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=self.options)
        usage = _resource_usage(built.asm["cubin"])
        return {
            "registers": usage["REG"],
            "spilled_bytes": usage["LOCAL"] + usage["STACK"],
            "shared_bytes": int(built.metadata.shared),
        }


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def record() -> dict[str, list[Launch]]:
    """What each op launches at the sizes of `kernel_cases`."""
    recorded: dict[str, list[Launch]] = {}
    own = JITFunction.run
    for name, case in cases(torch.device("meta")).items():
        found: list[Launch] = []

        def run(
            kernel: JITFunction,
            *args: Any,
            grid: Any,
            warmup: bool,
            _found: list[Launch] = found,
            **kwargs: Any,
        ) -> None:
            _found.append(Launch(kernel, args, kwargs))

        JITFunction.run = run  # pyright: ignore[reportAttributeAccessIssue]
        try:
            case.call("triton")()
        finally:
            JITFunction.run = own
        recorded[name] = found
    return recorded


def main() -> int:
    """Compile, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_LIMIT))
    arches = parser.parse_args().arch or sorted(SHARED_LIMIT)
    # Ops share kernels: what is launched twice alike is compiled once, and named by the first.
    distinct: dict[str, tuple[str, Launch]] = {}
    for name, found in record().items():
        for launch in found:
            distinct.setdefault(launch.key, (f"{name}/{launch.kernel.__name__}", launch))
    jobs = [
        (name, launch, arch)
        for name, launch in distinct.values()
        for arch in arches
        if launch.can_run(arch)
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        reports = list(pool.map(lambda job: job[1].compile(job[2]), jobs))
    result: dict[str, dict[str, dict[str, int]]] = {}
    bad = 0
    for (name, _, arch), report in zip(jobs, reports, strict=True):
        result.setdefault(name, {})[f"sm_{arch}"] = report
        bad += report["spilled_bytes"] > 0 or report["shared_bytes"] > SHARED_LIMIT[arch]
    print(json.dumps(result, indent=1))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
