"""Two processes capture one store, which holds what one process would have captured."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3_train.cli import main
from eagle3_train.store import FeatureStore

pytestmark = pytest.mark.distributed
TIMEOUT = 240  # seconds; a run takes about 15 on an idle core


def _capture(config: Path, out: Path, *settings: str) -> dict:
    """What two processes say on stdout."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "eagle3_train", "capture", str(config), f"output={out}"),
            *(*settings, "--num-processes", "2", "--json"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_target_in_slices_gives_the_states_of_a_whole_one(
    tmp_path: Path, write_run: Callable[[Path], Path]
) -> None:
    config = write_run(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    exact = "capture.store_dtype=float32"
    assert main(["capture", str(config), f"output={one}", exact]) == 0
    said = _capture(config, two, exact, "capture.placement=tensor_parallel")
    for split in ("train", "eval"):
        left, right = (FeatureStore(out / "features" / split) for out in (one, two))
        assert left.meta == right.meta
        assert said[split]["num_tokens"] == sum(left.lengths) == sum(right.lengths)
        assert left.head().equal(right.head())
        for i in range(len(left)):
            assert left[i].input_ids.equal(right[i].input_ids)
            assert left[i].argmax.equal(right[i].argmax)
            for name in ("aux", "final", "logz"):  # slices are added in another order
                torch.testing.assert_close(
                    getattr(left[i], name), getattr(right[i], name), rtol=1e-4, atol=1e-4
                )


def test_two_processes_fill_one_store(
    tmp_path: Path, write_run: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    kind = "capture.store_dtype=float8_e4m3"
    assert main(["capture", str(config), f"output={one}", kind]) == 0
    said = _capture(config, two, kind)
    for split, count in (("train", 16), ("eval", 4)):
        left, right = (FeatureStore(out / "features" / split) for out in (one, two))
        assert (len(left), left.meta) == (count, right.meta)
        assert left.lengths == right.lengths
        assert said[split]["num_tokens"] == sum(left.lengths)
        names = sorted(p.name for p in (two / "features" / split).glob("shard-*"))
        assert names == ["shard-0-00000.safetensors", "shard-1-00000.safetensors"]
        for i in range(count):
            assert left[i].input_ids.equal(right[i].input_ids)
            # Batches of other shapes add in another order; eight bits may then round either way.
            torch.testing.assert_close(left[i].aux, right[i].aux, rtol=2**-3, atol=1e-3)
        torch.testing.assert_close(left.target_mass(), right.target_mass(), rtol=1e-2, atol=1e-3)

    shard = two / "features" / "train" / "shard-1-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-300] ^= 4
    shard.write_bytes(data)
    capsys.readouterr()
    arguments = ["capture", str(config), f"output={two}", kind, "--verify", "--json"]
    assert main(arguments) == 0
    out, error = capsys.readouterr()
    assert f"{shard}: " in error
    assert "features/eval: every sample is as it was written" in error
    assert 0 < json.loads(out)["train"]["num_tokens"] < said["train"]["num_tokens"]
    assert all(FeatureStore(two / "features" / "train")[i] for i in range(16))
