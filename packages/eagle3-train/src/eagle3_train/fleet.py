"""Machines that train together: how their parents meet, and how each learns that another failed.

All talk through one TCPStore, held by the first machine's parent. Each parent counts a beat there
every second; one whose beat stands still is gone, and so is a store that does not answer.
"""

import contextlib
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from eagle3_core import UserError

JOIN_SECONDS = 300.0
_BEAT_SECONDS = 1.0
_SILENCE_SECONDS = 30.0
_FAILED = "failed"


@dataclass(frozen=True)
class Machine:
    """Where this machine stands among those of the run."""

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"  # of the first machine
    port: int = 0  # there; 0 = any free one, for a machine alone


class Fleet:
    """The machines of a run, met."""

    def __init__(self, machine: Machine, num_processes: int) -> None:
        """Wait until every machine is here.

        Raises:
            UserError: the first machine cannot be reached, or not all come within JOIN_SECONDS.
        """
        self.machine = machine
        self._store = _open_store(machine)
        self.port = self._store.port
        sizes = self._join(num_processes)
        self.first_rank, self.world_size = sum(sizes[: machine.rank]), sum(sizes)
        self._failure: str | None = None
        self._heard = time.monotonic()
        self._left = threading.Event()
        if machine.count > 1:
            threading.Thread(target=self._watch, daemon=True).start()

    def failure(self) -> str | None:
        """What went wrong on another machine, if anything."""
        if self.machine.count > 1 and time.monotonic() - self._heard > _SILENCE_SECONDS:
            return self._failure or "the first machine does not answer any more"
        return self._failure

    def end(self, cause: str | None) -> None:
        """This machine has ended, for a `cause` that the others have to know, or well."""
        if self.machine.count == 1:
            return
        with contextlib.suppress(DistError):
            if cause is not None:
                self._store.compare_set(_FAILED, "", f"{cause} (machine {self.machine.rank})")
            self._store.set(f"ended/{self.machine.rank}", "")

    def look_up(self, key: str) -> str | None:
        """A value of the store, if it is there."""
        if self.failure() is not None and self.machine.rank > 0:
            return None  # the store may be gone, and asking it would take minutes
        with contextlib.suppress(DistError):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return None

    def leave(self) -> None:
        """The first machine stays until the others have read what they need."""
        if self.machine.count > 1 and self.machine.rank == 0:
            others = [f"ended/{rank}" for rank in range(1, self.machine.count)]
            with contextlib.suppress(DistError):
                self._store.wait(others, timedelta(seconds=_SILENCE_SECONDS))
        self._left.set()

    def _join(self, num_processes: int) -> list[int]:
        """Tell the others how many processes are here; returns the number on each machine."""
        machine, store = self.machine, self._store
        if store.add(f"taken/{machine.rank}", 1) > 1:
            raise UserError(f"--node-rank {machine.rank} is taken, expected one that is not")
        store.set(f"size/{machine.rank}", f"{num_processes} {machine.count}")
        keys = [f"size/{rank}" for rank in range(machine.count)]
        try:
            store.wait(keys, timedelta(seconds=JOIN_SECONDS))
        except DistError:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise UserError(
                f"--nodes {machine.count}: machine {', '.join(missing)} did not come within "
                f"{JOIN_SECONDS:.0f} s; start the same command there with its --node-rank"
            ) from None
        found = [store.get(key).decode().split() for key in keys]
        for rank, (_, count) in enumerate(found):
            if int(count) != machine.count:
                raise UserError(
                    f"--nodes is {machine.count} on machine {machine.rank} and {count} on "
                    f"machine {rank}, expected the same on all"
                )
        return [int(size) for size, _ in found]

    def _watch(self) -> None:
        beats = {rank: (-1, time.monotonic()) for rank in range(self.machine.count)}
        while not self._left.wait(_BEAT_SECONDS):
            try:
                self._store.add(f"beat/{self.machine.rank}", 1)
                if self._store.check([_FAILED]):
                    self._failure = self._store.get(_FAILED).decode()
                    return
                for rank, (beat, since) in beats.items():
                    now = self._store.add(f"beat/{rank}", 0)
                    if now != beat or self._store.check([f"ended/{rank}"]):
                        beats[rank] = now, time.monotonic()
                    elif time.monotonic() - since > _SILENCE_SECONDS:
                        self._failure = f"machine {rank} does not answer any more"
                        return
            except DistError:
                self._failure = "the first machine is gone"
                return
            self._heard = time.monotonic()


def _open_store(machine: Machine) -> TCPStore:
    is_first = machine.rank == 0
    address = f"--rendezvous {machine.host}:{machine.port}"
    try:
        return TCPStore(
            machine.host,
            machine.port,
            is_master=is_first,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
    except DistError as error:
        reason = str(error).splitlines()[0]
        if is_first:
            raise UserError(f"{address}: cannot listen there: {reason}") from None
        raise UserError(
            f"{address}: nobody answers, expected the machine of --node-rank 0: {reason}"
        ) from None
