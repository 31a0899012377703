"""The thread that owns the engine, and the way into and out of it for the event loop.

Everything that touches the engine runs on that thread, between two rounds. The event loop sends
functions in and gets token outputs back; nothing is shared, so nothing is locked.
"""

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from eagle3_core import UserError
from eagle3_serve.engine import Engine, QueueFullError, TokenOutput
from eagle3_serve.sampling import SamplingParams
from eagle3_serve.server.errors import ApiError

_LOG = logging.getLogger(__name__)


class Submission:
    """The engine requests behind one HTTP request, and what they have put out."""

    def __init__(self, count: int) -> None:
        self.ids = [uuid.uuid4().hex for _ in range(count)]
        self.inbox: asyncio.Queue[TokenOutput | ApiError] = asyncio.Queue()

    async def outputs(self) -> AsyncIterator[tuple[int, TokenOutput]]:
        """(request index, output) in the order they come, until every request has ended.

        Raises:
            ApiError: the engine failed or the server is shutting down.
        """
        index = {request_id: i for i, request_id in enumerate(self.ids)}
        while index:
            output = await self.inbox.get()
            if isinstance(output, ApiError):
                raise output
            if output.error is not None:
                raise ApiError(504 if output.finish_reason == "timeout" else 500, output.error)
            yield index[output.request_id], output
            if output.finish_reason is not None:
                del index[output.request_id]


class EngineWorker:
    """Runs an engine on its own thread."""

    def __init__(self, engine: Engine) -> None:
        """Other threads may read the engine's settings and counters, and nothing else."""
        self.engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._submissions: dict[str, Submission] = {}  # event loop's, by request id
        self._running: set[str] = set()  # the thread's
        self._refusal: str | None = None  # why no request is taken any more
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread is running."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; call from the event loop that will submit requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, jobs: Sequence[tuple[Sequence[int], SamplingParams]]) -> Submission:
        """Hand prompts to the engine, all or none.

        Raises:
            ApiError: 400 if the engine refuses one, 503 if the server is shutting down.
        """
        submission = Submission(len(jobs))
        accepted: asyncio.Future[None] = self._loop.create_future()

        def add() -> None:
            error = self._add(submission.ids, jobs)
            self._loop.call_soon_threadsafe(_settle, accepted, error)

        self._submissions |= dict.fromkeys(submission.ids, submission)
        self._calls.put(add)
        try:
            await accepted
        except BaseException:
            self.abort(submission)
            raise
        return submission

    def abort(self, submission: Submission) -> None:
        """Drop what is left of a submission; harmless if it has ended."""
        left = [i for i in submission.ids if self._submissions.pop(i, None) is not None]
        if left:
            self._calls.put(lambda: self._abort(left))

    def fail_all(self, reason: str) -> None:
        """End every request now, and refuse new ones, with a 503 that says why."""

        def fail() -> None:
            self._refusal = reason
            self._fail(ApiError(503, reason))

        self._calls.put(fail)

    async def stop(self) -> None:
        """Fail what still runs and end the thread."""

        def end() -> None:
            self._stopped = True

        self.fail_all("the server is shutting down")
        self._calls.put(end)
        await asyncio.to_thread(self._thread.join)
        while not self._calls.empty():  # came too late for the thread: refused here
            self._calls.get_nowait()()

    def _run(self) -> None:
        while not self._stopped:
            self._take_calls()
            if not self.engine.has_work:
                continue
            try:
                outputs = self.engine.step()
            except Exception as error:
                _LOG.exception("a decoding round failed")
                self._fail(ApiError(500, f"internal error while decoding: {type(error).__name__}"))
                continue
            self._running -= {o.request_id for o in outputs if o.finish_reason is not None}
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _take_calls(self) -> None:
        """Make all calls that wait; when the engine idles, wait for one."""
        call = None if self.engine.has_work else self._calls.get()
        while True:
            if call is not None:
                call()
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return

    def _add(
        self, ids: Sequence[str], jobs: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> ApiError | None:
        if self._refusal is not None:
            return ApiError(503, self._refusal)
        try:
            for request_id, (prompt_ids, params) in zip(ids, jobs, strict=True):
                self.engine.add(prompt_ids, params, request_id)
                self._running.add(request_id)
        except UserError as error:
            self._abort(ids)
            return ApiError(400, str(error))
        except QueueFullError as error:
            self._abort(ids)
            return ApiError(503, str(error), code="queue_full", retry_after=1)
        except Exception as error:
            _LOG.exception("a request could not be added")
            self._abort(ids)
            return ApiError(500, f"internal error: {type(error).__name__}")
        return None

    def _abort(self, ids: Iterable[str]) -> None:
        for request_id in self._running.intersection(ids):
            self._running.remove(request_id)
            self.engine.abort(request_id)

    def _fail(self, error: ApiError) -> None:
        failed = list(self._running)
        self._abort(failed)
        self._loop.call_soon_threadsafe(self._deliver_error, failed, error)

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            submission = self._submissions.get(output.request_id)
            if submission is not None:  # else it was aborted while the round ran
                submission.inbox.put_nowait(output)
                if output.finish_reason is not None:
                    del self._submissions[output.request_id]

    def _deliver_error(self, failed: Sequence[str], error: ApiError) -> None:
        for request_id in failed:
            submission = self._submissions.pop(request_id, None)
            if submission is not None:
                submission.inbox.put_nowait(error)


def _settle(future: asyncio.Future[None], error: ApiError | None) -> None:
    if future.done():  # the client went away meanwhile
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
