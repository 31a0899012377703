"""The endpoints over an engine: the OpenAI API, what an operator asks for, and a page."""

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from eagle3_core import UserError
from eagle3_core.target import Target
from eagle3_serve.engine import TokenOutput
from eagle3_serve.prompts import encode_chat, encode_text
from eagle3_serve.server.errors import ApiError, install_error_handlers
from eagle3_serve.server.guard import Guard
from eagle3_serve.server.info import server_info
from eagle3_serve.server.metrics import ServerMetrics
from eagle3_serve.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from eagle3_serve.server.responses import (
    ChatFormat,
    Choice,
    CompletionFormat,
    Piece,
    ResponseFormat,
    Usage,
)
from eagle3_serve.server.tokens import TokenTexts
from eagle3_serve.server.tools import READERS, CallReader, ForcedReader
from eagle3_serve.server.worker import EngineWorker, Submission

T = TypeVar("T")
Outputs = AsyncIterator[tuple[int, TokenOutput]]  # with the index of the choice


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What an operator decides about the server, beside the engine."""

    api_key: str | None = None
    tool_call_parser: str | None = None  # a key of `READERS`


def create_app(
    worker: EngineWorker, target: Target, options: ServerOptions | None = None
) -> FastAPI:
    """The application; it starts the worker's thread and stops it at shutdown."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.stop()

    options = options or ServerOptions()
    app = FastAPI(title="eagle3-serve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, api_key=options.api_key)
    install_error_handlers(app)
    _Endpoints(worker, target, options).install(app)
    return app


class _Endpoints:
    def __init__(self, worker: EngineWorker, target: Target, options: ServerOptions) -> None:
        self._worker = worker
        self._target = target
        self._options = options
        self._metrics = ServerMetrics(worker.engine)
        self._started = int(time.time())
        # The engine's thread uses the target's tokenizer; fast tokenizers refuse to be used from
        # two threads at once ("Already borrowed"), so encoding has a copy and takes turns.
        self._tokenizer = copy.deepcopy(target.tokenizer)
        self._encoding = asyncio.Lock()
        self._texts = TokenTexts(copy.deepcopy(target.tokenizer))  # the event loop's own

    def install(self, app: FastAPI) -> None:
        app.get("/")(self.page)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        app.get("/server_info")(self.info)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/completions", response_model=None)(self.completions)
        app.post("/v1/chat/completions", response_model=None)(self.chat)

    async def page(self) -> HTMLResponse:
        return HTMLResponse(files("eagle3_serve.server").joinpath("page.html").read_text("utf-8"))

    async def health(self) -> JSONResponse:
        alive = self._worker.is_alive
        return JSONResponse({"status": "ok" if alive else "down"}, 200 if alive else 503)

    async def metrics(self) -> Response:
        content, content_type = self._metrics.exposition()
        return Response(content, media_type=content_type)

    async def info(self) -> dict[str, Any]:
        return server_info(self._worker.engine, self._options.tool_call_parser)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._model()

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        self._check_model(body.model)
        prompts = [await self._completion_prompt(prompt) for prompt in body.prompt]
        form = CompletionFormat(
            self._target.name,
            self._texts,
            has_logprobs=body.logprobs is not None,
            echoes=await self._echoes(body),
        )
        return await self._respond(request, body, prompts, form)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        self._check_model(body.model)
        reader = self._reader(body)
        messages = [message.for_template() for message in body.messages]
        tools = [tool.for_template() for tool in body.tools]
        encode = partial(encode_chat, tools=tools)
        prompt = await self._on_tokenizer(encode, "tools" if tools else "messages", messages)
        form = ChatFormat(
            self._target.name, self._texts, has_logprobs=body.logprobs, new_reader=reader
        )
        return await self._respond(request, body, [prompt], form)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._target.name,
            "object": "model",
            "created": self._started,
            "owned_by": "eagle3-serve",
            "max_model_len": self._worker.engine.max_model_len,
        }

    def _check_model(self, name: str | None) -> None:
        served = self._target.name
        if name not in (None, served):
            message = f"model: {name!r} is not served here, expected {served!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _reader(self, body: ChatRequest) -> type[CallReader] | None:
        """What finds tool calls in an answer; None where there can be none."""
        if body.forces_tool:
            return ForcedReader
        if not body.tools or body.tool_choice == "none":
            return None
        if self._options.tool_call_parser is None:
            message = (
                "tools: the server does not know how this model marks a call (start it with "
                "--tool-call-parser); send tool_choice required, none or a function's name"
            )
            raise ApiError(400, message, param="tools")
        return READERS[self._options.tool_call_parser]

    async def _completion_prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._on_tokenizer(encode_text, "prompt", prompt)
        self._check_ids("prompt", prompt)
        return prompt

    async def _echoes(self, body: CompletionRequest) -> list[str]:
        """What each choice's text begins with, if the prompt is to be part of it."""
        if not body.echo:
            return []

        def decode(tokenizer: Any, prompt: list[int]) -> str:
            return tokenizer.decode(prompt, skip_special_tokens=True)

        texts = [
            prompt
            if isinstance(prompt, str)
            else await self._on_tokenizer(decode, "prompt", prompt)
            for prompt in body.prompt
        ]
        return [text for text in texts for _ in range(body.n)]

    def _check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        size = self._target.vocab_size
        wrong = next((i for i in token_ids if not 0 <= i < size), None)
        if wrong is not None:
            message = f"{param}: token id {wrong} is not in 0..{size - 1}"
            raise ApiError(400, message, param=param)

    async def _on_tokenizer(self, work: Callable[..., T], param: str, *args: Any) -> T:
        """Run `work(tokenizer, *args)` on another thread, one at a time."""
        try:
            async with self._encoding:
                return await asyncio.to_thread(work, self._tokenizer, *args)
        except UserError as error:
            # Messages begin with the field at fault, which may be another than the one encoded.
            field = str(error).partition(":")[0]
            named = field if field in ("messages", "tools", "prompt") else param
            raise ApiError(400, str(error), param=named) from error

    async def _check_grammar(self, body: GenerationRequest) -> None:
        """Compile it here, where it holds up nobody; the engine finds it compiled."""
        field, grammar = body.grammar()
        if grammar is not None:

            def compile_grammar(_: Any) -> None:
                try:
                    self._worker.engine.grammars.check(grammar)
                except UserError as error:
                    raise UserError(f"{field}: {error}") from error

            await self._on_tokenizer(compile_grammar, field)

    async def _respond(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[list[int]],
        form: ResponseFormat,
    ) -> Response:
        self._check_ids("stop_token_ids", body.stop_token_ids)
        self._check_ids("logit_bias", [token_id for token_id, _ in body.logit_bias])
        await self._check_grammar(body)
        jobs = [(prompt, body.sampling(choice)) for prompt in prompts for choice in range(body.n)]
        usage = Usage(sum(len(prompt) for prompt in prompts), num_choices=body.n)
        choices = [form.choice(index) for index in range(len(jobs))]
        submission = await self._worker.submit(jobs)
        outputs = self._metrics.watched(submission)
        if body.stream:
            options = body.stream_options or StreamOptions()
            events = self._events(submission, outputs, choices, form, usage, options)
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            pieces = await _unless_gone(request, _collect(outputs, choices, usage))
        finally:
            self._worker.abort(submission)
        if pieces is None:
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(form.whole(list(zip(choices, pieces, strict=True)), usage))

    async def _events(
        self,
        submission: Submission,
        outputs: Outputs,
        choices: Sequence[Choice],
        form: ResponseFormat,
        usage: Usage,
        options: StreamOptions,
    ) -> AsyncIterator[str]:
        """Server-sent events of a response; ends the engine's work if the client leaves.

        With `include_usage`, every chunk has a `usage`: null until the last (OpenAI API reference),
        unless the counts so far are wanted.
        """

        def so_far() -> dict[str, Any]:
            if not options.include_usage:
                return {}
            return {"usage": usage.counts() if options.continuous_usage_stats else None}

        try:
            for choice in choices:
                if opening := form.opening(choice):
                    yield _event(opening | so_far())
            async for index, output in outputs:
                usage.add(output)
                piece = choices[index].read(output)
                if not piece.is_empty:
                    yield _event(form.chunk(choices[index], piece) | so_far())
            if options.include_usage:
                yield _event(form.usage(usage))
            yield "data: [DONE]\n\n"
        except ApiError as error:  # the status line is out already
            yield _event(error.body())
        finally:
            self._worker.abort(submission)


async def _collect(outputs: Outputs, choices: Sequence[Choice], usage: Usage) -> list[Piece]:
    pieces = [Piece() for _ in choices]
    async for index, output in outputs:
        usage.add(output)
        pieces[index].add(choices[index].read(output))
    return pieces


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
