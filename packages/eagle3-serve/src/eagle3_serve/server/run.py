"""Runs the application until a signal: says when it is ready, drains, ends with status 0."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from eagle3_core import UserError
from eagle3_serve.server.worker import EngineWorker

DRAIN_SECONDS = 20.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a taken port is known at once.

    Raises:
        UserError: the address cannot be bound.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"--port: {port} is not in 0..65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}") from error
    return listener


def run(
    app: FastAPI, worker: EngineWorker, listener: socket.socket, ready: Callable[[], None]
) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish for `DRAIN_SECONDS`.

    Requests that are not done by then, or at a second signal, end with a 503 error.

    Args:
        app: from `create_app`, with the same worker.
        worker: the engine's.
        listener: from `listen`.
        ready: called once requests are accepted.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        # A margin over the drain, for the failed requests to be answered.
        timeout_graceful_shutdown=int(DRAIN_SECONDS) + 5,
    )
    asyncio.run(_serve(_Server(config, worker), listener, ready))


async def _serve(server: "_Server", listener: socket.socket, ready: Callable[[], None]) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        ready()
    await serving


class _Server(uvicorn.Server):
    """uvicorn, but a signal is a request to end well: it is not raised again at the end."""

    def __init__(self, config: uvicorn.Config, worker: EngineWorker) -> None:
        super().__init__(config)
        self._worker = worker

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals on the event loop while serving."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.should_exit:
            self._worker.fail_all("the server is shutting down")
            return
        self.should_exit = True
        asyncio.get_running_loop().call_later(
            DRAIN_SECONDS, self._worker.fail_all, "the server is shutting down"
        )
