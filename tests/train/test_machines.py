"""Several machines, played by parents on the loopback: they meet, and end together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_core import UserError
from eagle3_train import fleet
from eagle3_train.cli import main
from eagle3_train.fleet import Fleet, Machine
from eagle3_train.slurm import adopt_step, first_host, in_step

TIMEOUT = 120  # seconds; seconds on an idle core

PARENT = """
import sys
from eagle3_train.fleet import Machine
from eagle3_train.launch import launch
rank, port, processes, worker, folder = sys.argv[1:]
machine = Machine(2, int(rank), "127.0.0.1", int(port))
sys.exit(launch([sys.executable, worker, folder], int(processes), machine))
"""

# Adds up ranks, says so, and then stays inside collectives until it is killed or loses a peer.
WORKER = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from eagle3_train.launch import follow_parent
follow_parent()
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
place = f"{os.environ['LOCAL_RANK']}/{os.environ['LOCAL_WORLD_SIZE']} {os.environ['GROUP_RANK']}"
path = Path(sys.argv[1], str(dist.get_rank()))
path.with_suffix(".part").write_text(f"{os.getpid()} {int(total)} {place}")
path.with_suffix(".part").rename(path)
while True:
    dist.all_reduce(torch.ones(1 << 20))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def parents(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two machines, of two processes and of one, whose processes are inside collectives."""
    worker, port = tmp_path / "worker.py", str(free_port())
    worker.write_text(WORKER)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PARENT, str(rank), port, count, str(worker), str(tmp_path)],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank, count in enumerate(("2", "1"))
    ]  # fmt: skip
    try:
        wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)))
        yield started
    finally:
        for parent in started:
            parent.kill()
            parent.communicate()


def wait_for(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.distributed
def test_a_process_killed_inside_a_collective_ends_all_machines(
    tmp_path: Path, parents: list[subprocess.Popen[str]]
) -> None:
    said = [(tmp_path / str(rank)).read_text().split(maxsplit=1) for rank in range(3)]
    assert [text for _, text in said] == ["6 0/2 0", "6 1/2 0", "6 0/1 1"]
    pids = [int(pid) for pid, _ in said]
    os.kill(pids[2], signal.SIGKILL)
    errors = [parent.communicate(timeout=TIMEOUT)[1] for parent in parents]
    assert [parent.returncode for parent in parents] == [1, 128 + signal.SIGKILL]
    assert "eagle3-train: process 2 was killed by SIGKILL (machine 1)\n" in errors[0]
    assert "eagle3-train: process 2 was killed by SIGKILL\n" in errors[1]
    wait_for(lambda: all(map(is_gone, pids)))


@pytest.mark.distributed
def test_a_parent_that_dies_takes_its_processes_and_ends_the_other_machine(
    tmp_path: Path, parents: list[subprocess.Popen[str]]
) -> None:
    pids = [int((tmp_path / str(rank)).read_text().split()[0]) for rank in range(3)]
    parents[0].kill()
    error = parents[1].communicate(timeout=TIMEOUT)[1]
    assert parents[1].returncode != 0
    assert "eagle3-train: " in error
    wait_for(lambda: all(map(is_gone, pids)))


def test_machines_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "JOIN_SECONDS", 1.0)
    with pytest.raises(UserError, match="machine 1 did not come within 1 s"):
        Fleet(Machine(2, 0, "127.0.0.1", free_port()), 1)
    with pytest.raises(UserError, match="nobody answers, expected the machine of --node-rank 0"):
        Fleet(Machine(2, 1, "127.0.0.1", free_port()), 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="cannot listen there"):
            Fleet(Machine(2, 0, "127.0.0.1", taken.getsockname()[1]), 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nodes", "2"], "--rendezvous is None, expected HOST:PORT"),
        (["--nodes", "2", "--rendezvous", "host"], "--rendezvous is host, expected HOST:PORT"),
        (["--nodes", "2", "--node-rank", "2"], "--node-rank is 2, expected 0 to 1"),
        (["--rendezvous", "host:1"], "--rendezvous without --nodes"),
    ],
)
def test_options_that_contradict_each_other(
    tmp_path: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("{output: out, target: t, data: {train: [x.jsonl]}}")
    assert main(["fit", str(config), *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_a_slurm_step_is_taken_as_torchrun_names_it() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert not in_step(batch)
    step = {
        **batch,
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_JOB_ID": "123456",
    }
    adopt_step(step)
    found = {k: step[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert list(found.values()) == ["5", "1", "8", "gpu07", "18456"]
    adopt_step(batch)
    assert "RANK" not in batch


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu07", "gpu07"), ("a,b", "a"), ("n[3,5-9]", "n3"), ("r1n[01-04]-ib,x", "r1n01-ib")],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
