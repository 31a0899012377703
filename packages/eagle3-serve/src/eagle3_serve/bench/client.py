"""One streamed request to an OpenAI-compatible endpoint, and when its tokens came."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import httpx

from eagle3_core import UserError

# What to ask for beside text, the most telling first; not every server takes all of it.
# continuous_usage_stats is an extension of vLLM, SGLang and this server.
_STREAM_OPTIONS = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
_CONNECT_SECONDS = 10.0


class Prompt(NamedTuple):
    """A request without what is the same for all of them."""

    path: str
    body: Mapping[str, Any]


class Failure(NamedTuple):
    """Why a request has no answer."""

    kind: str  # to count by
    message: str


class Arrival(NamedTuple):
    """A chunk with new output."""

    seconds: float  # since the request was sent
    num_tokens: int | None  # up to this one, if the server says so


@dataclass
class Answer:
    """What came of a request."""

    arrivals: list[Arrival] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    is_whole: bool = False
    failure: Failure | None = None

    @property
    def num_tokens(self) -> int:
        """Of the output: the server's count, or chunks where it gives none."""
        return self.usage.get("completion_tokens", len(self.arrivals))

    @property
    def has_chunk_counts(self) -> bool:
        """Whether the server said of each chunk how many tokens had come."""
        return bool(self.arrivals) and self.arrivals[-1].num_tokens is not None

    @property
    def chunk_gaps(self) -> list[float]:
        """Seconds between one chunk and the next."""
        return [later.seconds - before.seconds for before, later in pairwise(self.arrivals)]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds a token behind the first chunk: k tokens after a gap g took g/k each.

        k is what the server says of the chunk (and the gap counts k times), or else the mean over
        this answer. So the gaps of an answer add up to the time between its first and last chunk. A
        gap by itself is a round of speculative decoding, not a token: peers' benchmarks reported it
        as one (SGLang PR 12064, vLLM PR 50600).
        """
        if self.has_chunk_counts:
            counts = [arrival.num_tokens or 0 for arrival in self.arrivals]
            sizes = [later - before for before, later in pairwise(counts)]
            pairs = zip(self.chunk_gaps, sizes, strict=True)
            return [gap / size for gap, size in pairs for _ in range(size)]
        gaps = self.chunk_gaps
        return [gap * len(gaps) / max(self.num_tokens - 1, 1) for gap in gaps]

    def read(self, chunk: Mapping[str, Any], seconds: float) -> None:
        """Take in one event of the stream."""
        if chunk.get("error"):
            self.failure = Failure("error in the stream", _message(chunk))
            return
        self.usage = chunk.get("usage") or self.usage
        choices = chunk.get("choices") or ()
        new = "".join(_text(choice) for choice in choices)
        self.text += new
        self.is_whole |= any(choice.get("finish_reason") for choice in choices)
        count = (chunk.get("usage") or {}).get("completion_tokens")
        if self.arrivals and self.arrivals[-1].num_tokens is None:
            count = None  # of the last chunk alone
        before = (self.arrivals[-1].num_tokens if self.arrivals else 0) or 0
        # A chunk that opens or closes an answer has no token.
        if choices and (new if count is None else count > before):
            self.arrivals.append(Arrival(seconds, count))


class Endpoint:
    """A server that is loaded, and how it wants to be asked."""

    def __init__(self, name: str, http: httpx.AsyncClient, seconds: float) -> None:
        """`name` is for messages; `seconds` bound a request. Made by `connect`."""
        self.name = name
        self.model = ""
        self._http, self._seconds = http, seconds
        self._extras: Mapping[str, Any] = {}

    async def ask(self, prompt: Prompt) -> Answer:
        """Send a request and read its answer to the end; failures are part of the answer."""
        answer = Answer()
        body = {**prompt.body, "model": self.model, "stream": True, **self._extras}
        start = perf_counter()
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._http.stream("POST", prompt.path, json=body) as response,
            ):
                if response.status_code != 200:
                    message = _message(_json(await response.aread()))
                    answer.failure = Failure(str(response.status_code), message)
                    return answer
                async for event in _events(response):
                    answer.read(event, perf_counter() - start)
        except TimeoutError:
            answer.failure = Failure("timeout", f"took longer than {self._seconds:g} s")
        except httpx.HTTPError as error:
            answer.failure = Failure(type(error).__name__, str(error) or "no answer")
        else:
            if not answer.is_whole and answer.failure is None:
                answer.failure = Failure("broken stream", "the stream ended without its end")
        answer.seconds = perf_counter() - start
        return answer

    async def choose_model(self, wanted: str | None) -> None:
        """Take the model that is wanted, or the only one there is.

        Raises:
            UserError: nothing answers, or there are several.
        """
        if wanted is not None:
            self.model = wanted
            return
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise UserError(f"{self.name}: cannot be reached: {error or 'no answer'}") from error
        body = _json(response.content)
        if response.status_code != 200:
            hint = "; give --api-key" if response.status_code in (401, 403) else ""
            raise UserError(
                f"{self.name}: /v1/models says {response.status_code}: {_message(body)}{hint}"
            )
        models = [model.get("id") for model in body.get("data") or () if isinstance(model, dict)]
        if len(models) != 1:
            raise UserError(
                f"{self.name}: serves {models or 'no models'}, expected one: give --model"
            )
        self.model = models[0]

    async def try_out(self, prompt: Prompt) -> None:
        """Find out what the server says of a stream's tokens.

        Raises:
            UserError: it refuses the request, or does not answer.
        """
        answer = Answer()
        for self._extras in _STREAM_OPTIONS:
            answer = await self.ask(prompt)
            if answer.failure is None:
                return
            if answer.failure.kind not in ("400", "422"):
                break
        kind, message = answer.failure or ("", "")
        raise UserError(f"{self.name}: the first request failed: {kind}: {message}")


@asynccontextmanager
async def connect(
    flag: str, url: str, model: str | None, api_key: str | None, seconds: float
) -> AsyncIterator[Endpoint]:
    """An endpoint at a URL, with or without its `/v1`; not tried out yet.

    Args:
        flag: that gave the URL.
        url: of the server.
        model: to ask for; None = the only one.
        api_key: sent along, if there is one.
        seconds: bound on every request.

    Raises:
        UserError: it is no URL, nothing answers, or the model cannot be chosen.
    """
    name = f"{flag} {url}"
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{name}: expected an address that begins with http:// or https://")
    root = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    try:
        http = httpx.AsyncClient(base_url=root, headers=headers, limits=limits, timeout=timeout)
    except httpx.InvalidURL as error:
        raise UserError(f"{name}: is no address: {error}") from error
    async with http:
        endpoint = Endpoint(name, http, seconds)
        await endpoint.choose_model(model)
        yield endpoint


async def _events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events.

    Split at newlines alone: JSON may hold other line separators as they are.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != b"[DONE]":
                yield _json(content)


def _json(content: bytes) -> Mapping[str, Any]:
    """An object; something else comes back as an error's message."""
    try:
        value = json.loads(content)
    except ValueError:
        value = content.decode(errors="replace")
    return value if isinstance(value, dict) else {"error": str(value)}


def _message(body: Mapping[str, Any]) -> str:
    """What an error says, on one line: servers disagree about where it stands."""
    error = body.get("error", body.get("detail", body))
    text = error.get("message", error) if isinstance(error, dict) else error
    line = " ".join(str(text).split())
    return line if len(line) <= 200 else line[:197] + "..."


def _text(choice: Mapping[str, Any]) -> str:
    """New output of a choice: of a completion, or of a chat with all that a model may say."""
    delta = choice.get("delta") or choice
    parts: Sequence[Any] = [
        delta.get(key) for key in ("reasoning_content", "reasoning", "content", "text")
    ]
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    parts = [*parts, *(call.get(key) for call in calls for key in ("name", "arguments"))]
    return "".join(part for part in parts if part)
