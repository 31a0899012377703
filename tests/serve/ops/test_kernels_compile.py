"""Kernels compile for the GPUs they are meant for, without spilling and within shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_no_kernel_spills_or_asks_for_more_shared_memory_than_there_is():
    # In a process of its own: here the kernels belong to the interpreter.
    done = subprocess.run(
        [sys.executable, "benchmarks/compile_kernels.py"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    folders = {
        p.parent.name for p in ROOT.glob("packages/eagle3-serve/src/eagle3_serve/ops/*/triton.py")
    }
    assert folders <= {name.split("/")[0].split(" ")[0] for name in report}
    for name, by_arch in report.items():
        expected = {"sm_90", "sm_100"} if "float8" in name else {"sm_80", "sm_90", "sm_100"}
        assert set(by_arch) == expected, name
        for arch, usage in by_arch.items():
            assert usage["spilled_bytes"] == 0, (name, arch, usage)
    assert done.returncode == 0, done.stdout
