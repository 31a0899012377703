"""The processes of a run: started together, on one machine or several, and ended together.

On each machine a parent starts its share. The first machine's parent holds the store where all
meet; through it every parent learns within seconds that a process failed anywhere, or that another
parent is gone (`fleet.py`).
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from eagle3_train.fleet import Fleet, Machine

_GRACE_SECONDS = 15.0  # from the first failure until the others are killed
_SETTLE_SECONDS = 3.0  # in which a cause shows beside its consequences, on another machine too
_POLL_SECONDS = 0.1
_LAUNCHED = "EAGLE3_TRAIN_LAUNCHED"
_ERROR_KEY = "error"
_INTERRUPTED = 130


def is_worker() -> bool:
    """Whether this process was started by `launch`, by torchrun or by something like it."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def follow_parent() -> None:
    """Die with the parent, however it dies, so that nothing trains on unseen."""
    if _LAUNCHED not in os.environ:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def report_error(message: str) -> None:
    """Print a user's mistake; processes that make the same one say it once, through the parent."""
    if _LAUNCHED not in os.environ:
        print(message, file=sys.stderr)
        return
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
    )
    store.compare_set(_ERROR_KEY, "", message)


def launch(command: Sequence[str], num_processes: int, machine: Machine | None = None) -> int:
    """Run `command` in `num_processes` processes here; returns the exit status of the run.

    Ctrl-C reaches every process through the terminal's process group; each saves and ends.

    Args:
        command: of each process, which finds its place in the environment as under torchrun.
        num_processes: on this machine.
        machine: this one among several; none = it is the only one.

    Raises:
        UserError: the machines do not meet.
    """
    fleet = Fleet(machine or Machine(), num_processes)
    processes = [
        subprocess.Popen(command, env=_environment(fleet, local, num_processes))
        for local in range(num_processes)
    ]
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminate = signal.signal(signal.SIGTERM, lambda *_: _send(processes, signal.SIGTERM))
    try:
        status, cause = _wait(processes, fleet)
        fleet.end(cause if status not in (0, _INTERRUPTED) else None)
    finally:
        _end(processes)
        said = fleet.look_up(_ERROR_KEY)
        fleet.leave()
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)
    if said is not None:
        print(said, file=sys.stderr)
    elif status not in (0, _INTERRUPTED):
        print(f"eagle3-train: {cause}", file=sys.stderr)
    return status


def _environment(fleet: Fleet, local: int, num_processes: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment |= {
        "RANK": str(fleet.first_rank + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(fleet.world_size),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "GROUP_RANK": str(fleet.machine.rank),
        "MASTER_ADDR": fleet.machine.host,
        "MASTER_PORT": str(fleet.port),
        _LAUNCHED: "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent's store is the rendezvous
    }
    threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def _wait(processes: Sequence[subprocess.Popen[bytes]], fleet: Fleet) -> tuple[int, str]:
    """Until all have ended well, or one has not, here or elsewhere: exit status and cause."""
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return 0, ""
        if any(codes):
            break  # an interrupted run ends by itself, and its processes together
        if (elsewhere := fleet.failure()) is not None:
            return 1, elsewhere
        time.sleep(_POLL_SECONDS)
    settled = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < settled and not any((p.poll() or 0) < 0 for p in processes):
        if (elsewhere := fleet.failure()) is not None:
            return 1, elsewhere
        time.sleep(_POLL_SECONDS)
    failed = [(fleet.first_rank + i, p.returncode) for i, p in enumerate(processes) if p.returncode]
    # Who was killed, or knows its mistake, is the cause; who lost its peers is a consequence.
    rank, code = min(failed, key=lambda f: (f[1] > 0, f[1] != 2, f[0]))
    if code < 0:
        return 128 - code, f"process {rank} was killed by {signal.Signals(-code).name}"
    return code, f"process {rank} ended with status {code}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the rest to end, give them a while, then kill."""
    _send(processes, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _send(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
