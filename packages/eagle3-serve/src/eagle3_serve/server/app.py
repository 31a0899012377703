"""The OpenAI-compatible endpoints over an engine."""

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from eagle3_core import UserError
from eagle3_core.target import Target
from eagle3_serve.prompts import encode_chat, encode_text
from eagle3_serve.server.errors import ApiError, install_error_handlers
from eagle3_serve.server.guard import Guard
from eagle3_serve.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from eagle3_serve.server.responses import (
    ChatFormat,
    Choice,
    CompletionFormat,
    ResponseFormat,
    Usage,
)
from eagle3_serve.server.worker import EngineWorker, Submission

T = TypeVar("T")


def create_app(worker: EngineWorker, target: Target, api_key: str | None = None) -> FastAPI:
    """The application; it starts the worker's thread and stops it at shutdown."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.stop()

    app = FastAPI(title="eagle3-serve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, api_key=api_key)
    install_error_handlers(app)
    _Endpoints(worker, target).install(app)
    return app


class _Endpoints:
    def __init__(self, worker: EngineWorker, target: Target) -> None:
        self._worker = worker
        self._target = target
        self._started = int(time.time())
        # The engine's thread uses the target's tokenizer; fast tokenizers refuse to be used from
        # two threads at once ("Already borrowed"), so encoding has a copy and takes turns.
        self._tokenizer = copy.deepcopy(target.tokenizer)
        self._encoding = asyncio.Lock()

    def install(self, app: FastAPI) -> None:
        app.get("/health")(self.health)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/completions", response_model=None)(self.completions)
        app.post("/v1/chat/completions", response_model=None)(self.chat)

    async def health(self) -> JSONResponse:
        alive = self._worker.is_alive
        return JSONResponse({"status": "ok" if alive else "down"}, 200 if alive else 503)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._model()

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        self._check_model(body.model)
        prompts = [await self._completion_prompt(prompt) for prompt in body.prompt]
        return await self._respond(request, body, prompts, CompletionFormat(self._target.name))

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        self._check_model(body.model)
        messages = [message.model_dump() for message in body.messages]
        prompt = await self._encode(encode_chat, "messages", messages)
        return await self._respond(request, body, [prompt], ChatFormat(self._target.name))

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._target.name,
            "object": "model",
            "created": self._started,
            "owned_by": "eagle3-serve",
        }

    def _check_model(self, name: str | None) -> None:
        served = self._target.name
        if name not in (None, served):
            message = f"model: {name!r} is not served here, expected {served!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _completion_prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._encode(encode_text, "prompt", prompt)
        self._check_ids("prompt", prompt)
        return prompt

    def _check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        size = self._target.vocab_size
        wrong = next((i for i in token_ids if not 0 <= i < size), None)
        if wrong is not None:
            message = f"{param}: token id {wrong} is not in 0..{size - 1}"
            raise ApiError(400, message, param=param)

    async def _encode(self, encode: Any, param: str, prompt: object) -> list[int]:
        try:
            async with self._encoding:
                return await asyncio.to_thread(encode, self._tokenizer, prompt)
        except UserError as error:
            raise ApiError(400, str(error), param=param) from error

    async def _respond(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[list[int]],
        form: ResponseFormat,
    ) -> Response:
        self._check_ids("stop_token_ids", body.stop_token_ids)
        jobs = [(prompt, body.sampling(choice)) for prompt in prompts for choice in range(body.n)]
        usage = Usage(sum(len(prompt) for prompt in prompts), num_choices=body.n)
        submission = await self._worker.submit(jobs)
        if body.stream:
            events = self._events(submission, form, usage, body.include_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            choices = await _unless_gone(request, _collect(submission, usage))
        finally:
            self._worker.abort(submission)
        if choices is None:
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(form.whole(choices, usage))

    async def _events(
        self, submission: Submission, form: ResponseFormat, usage: Usage, include_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events of a response; ends the engine's work if the client leaves.

        With `include_usage`, every chunk has a `usage`: null until the last (OpenAI API reference).
        """
        unknown = {"usage": None} if include_usage else {}
        try:
            for index in range(len(submission.ids)):
                if opening := form.opening(index):
                    yield _event(opening | unknown)
            async for index, output in submission.outputs():
                usage.add(output)
                if output.text:
                    yield _event(form.delta(index, output.text) | unknown)
                if output.finish_reason is not None:
                    yield _event(form.ending(index, output.finish_reason) | unknown)
            if include_usage:
                yield _event(form.usage(usage))
            yield "data: [DONE]\n\n"
        except ApiError as error:  # the status line is out already
            yield _event(error.body())
        finally:
            self._worker.abort(submission)


async def _collect(submission: Submission, usage: Usage) -> list[Choice]:
    choices = [Choice(index) for index in range(len(submission.ids))]
    async for index, output in submission.outputs():
        usage.add(output)
        choices[index].texts.append(output.text)
        choices[index].finish_reason = output.finish_reason
    return choices


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client disconnects before it is there."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
