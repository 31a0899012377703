"""The script for a GPU runs without one, at tiny sizes: it is ready when a GPU is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_gpu_check_runs_dry(tmp_path: Path):
    out = tmp_path / "check.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py", "--dry", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text())
    assert result["wrong"] == {}
    ops = {
        p.parent.name for p in ROOT.glob("packages/eagle3-serve/src/eagle3_serve/ops/*/triton.py")
    }
    assert ops == {name.split(",")[0].split(" ")[0] for name in result["kernels"]}
