"""Several training processes on this machine: started together, ended together.

The parent holds the rendezvous store, so no port is guessed; the first process that fails ends all.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_GRACE_SECONDS = 15.0  # from the first failure until the others are killed
_POLL_SECONDS = 0.1
_LAUNCHED = "EAGLE3_TRAIN_LAUNCHED"
_ERROR_KEY = "error"


def is_worker() -> bool:
    """Whether this process was started by `launch` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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


def launch(arguments: Sequence[str], num_processes: int) -> int:
    """Run `eagle3-train ARGUMENTS` in `num_processes` processes; returns the first failure's code.

    Ctrl-C reaches every process through the terminal's process group; each saves and ends.
    """
    # No `timeout` of the store bounds training: workers only meet here, then talk directly.
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5)
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "eagle3_train", *arguments],
            env=_environment(rank, num_processes, store.port),
        )
        for rank in range(num_processes)
    ]
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminate = signal.signal(signal.SIGTERM, lambda *_: _send(processes, signal.SIGTERM))
    try:
        return _wait(processes)
    finally:
        _end(processes)
        if store.check([_ERROR_KEY]):
            print(store.get(_ERROR_KEY).decode(), file=sys.stderr)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)


def _environment(rank: int, num_processes: int, port: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        _LAUNCHED: "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent's store is the rendezvous
    }
    threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    running = list(processes)
    while running:
        for process in running:
            code = process.poll()
            if code is not None and code != 0:
                return code if code > 0 else 128 - code
        running = [process for process in running if process.poll() is None]
        time.sleep(_POLL_SECONDS)
    return 0


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
