"""Two processes make the same run as one, end together, and say a shared mistake once.

The tiny target, its data and the captured states are made in this process; every run of `fit` is a
command of its own, as a user starts it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_core import load_draft
from eagle3_train.cli import main

pytestmark = pytest.mark.distributed
TIMEOUT = 240  # seconds; a run takes about 15 on an idle core


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, write_run: Callable[[Path], Path]) -> Path:
    """A run whose states are captured."""
    path = write_run(tmp_path_factory.mktemp("ddp"))
    assert main(["capture", str(path)]) == 0
    return path


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "eagle3_train", "fit", str(config), *arguments]


def environment() -> dict[str, str]:
    # Nothing that a user would not have set: accelerate has switches that hide mistakes.
    kept = {name: value for name, value in os.environ.items() if "ACCELERATE" not in name}
    return {**kept, "OMP_NUM_THREADS": "1"}


def fit(config: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run in a folder of its own that shares the captured states."""
    out.mkdir(exist_ok=True)
    if not (out / "features").exists():
        (out / "features").symlink_to(config.parent / "out/features")
    return subprocess.run(
        command(config, f"output={out}", *arguments),
        env=environment(), capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_give_the_curve_of_one(config: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for out, count in ((one, "1"), (two, "2")):
        done = fit(config, out, "--num-processes", count, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["num_steps"] == len(metrics(out))
    a, b = metrics(one), metrics(two)
    assert len(a) > 4
    for x, y in zip(a, b, strict=True):
        # The same float32 terms summed in another order; AdamW's division by a near-zero second
        # moment amplifies that in the first steps, so the curves part at 1e-5 of the loss.
        assert y["loss"] == pytest.approx(x["loss"], rel=2e-5)
        assert y["loss_per_step"] == pytest.approx(x["loss_per_step"], rel=2e-5)
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-3)
        assert (y["tokens"], y["num_rounds"]) == (x["tokens"], x["num_rounds"])
    assert b[-1]["eval"]["num_rounds"] == a[-1]["eval"]["num_rounds"]
    assert b[-1]["eval"]["loss_per_step"] == pytest.approx(a[-1]["eval"]["loss_per_step"], rel=1e-4)
    first, second = (load_draft(out / "draft").draft.state_dict() for out in (one, two))
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_step_smaller_than_the_processes(config: Path, tmp_path: Path) -> None:
    done = fit(config, tmp_path, "--num-processes", "2", "fit.batch_tokens=1", "fit.max_steps=2")
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path)) == 2


def test_a_shared_mistake_is_said_once(config: Path, tmp_path: Path) -> None:
    done = fit(config, tmp_path, "--num-processes", "2", "draft.vocab_size=9999")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("draft_vocab_size is 9999") == 1
    assert "Traceback" not in done.stderr


def test_a_killed_process_ends_the_run(config: Path, tmp_path: Path) -> None:
    (tmp_path / "features").symlink_to(config.parent / "out/features")
    arguments = [f"output={tmp_path}", "--num-processes", "2", "fit.epochs=100000"]
    parent = subprocess.Popen(
        command(config, *arguments), env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(metrics(tmp_path)) > 1)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        workers = [int(pid) for pid in children]
        os.kill(workers[1], signal.SIGKILL)
        assert parent.wait(TIMEOUT) == 128 + signal.SIGKILL
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        parent.kill()
        parent.communicate()


def test_an_interrupt_saves_and_the_same_command_continues(config: Path, tmp_path: Path) -> None:
    (tmp_path / "features").symlink_to(config.parent / "out/features")
    arguments = [f"output={tmp_path}", "--num-processes", "2", "fit.epochs=60"]
    parent = subprocess.Popen(
        command(config, *arguments),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        _wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(metrics(tmp_path)) > 1)
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
        _, error = parent.communicate(timeout=TIMEOUT)
    finally:
        parent.kill()
    stopped = len(metrics(tmp_path))
    assert parent.returncode == 130, error
    assert f"stopped after step {stopped}" in error
    assert (tmp_path / f"checkpoints/step-{stopped}/state.json").exists()
    assert not (tmp_path / "draft").exists()
    # The number of processes may change in between.
    done = fit(config, tmp_path, "fit.epochs=60")
    assert done.returncode == 0, done.stderr
    assert f"continues from {tmp_path}/checkpoints/step-{stopped}" in done.stderr
    assert [m["step"] for m in metrics(tmp_path)] == list(range(1, len(metrics(tmp_path)) + 1))


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.1)
