"""Levels of load: so many clients at once, each with one request at a time."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product
from time import perf_counter
from typing import Any

from eagle3_core import UserError
from eagle3_serve.bench.client import Answer, Endpoint, Prompt, connect
from eagle3_serve.bench.figures import ratios, same_texts, summarise

_WARM_UP_TOKENS = 8
_TASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}, each with its reason.",
    "Write an email that asks a colleague about {}.",
    "Compare {} with what people did a hundred years ago.",
    "Give step-by-step advice to somebody who is new to {}.",
)
_TOPICS = (
    "baking bread",
    "the tides",
    "sorting algorithms",
    "learning to swim",
    "railway timetables",
    "volcanoes",
    "keeping bees",
    "unit tests",
    "the French Revolution",
    "compound interest",
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to send, and how much of it."""

    concurrency: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    requests_per_client: int = 4
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False  # an extension of vLLM, SGLang and this server
    max_seconds: float = 120.0  # no request of a level starts later, and none may take longer
    model: str | None = None
    api_key: str | None = None

    @property
    def num_requests(self) -> int:
        """Of all levels, to one endpoint; warming up not included."""
        return sum(self.concurrency) * self.requests_per_client

    def request(self, row: Mapping[str, Any], index: int) -> Prompt:
        """The request number `index`, which asks a row of a prompts file."""
        field, path = ("messages", "chat/completions")
        if "prompt" in row:
            field, path = "prompt", "completions"
        body = {
            field: row[field],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **({"seed": index} if self.temperature else {}),
        }
        return Prompt(f"/v1/{path}", body)


def builtin_rows(count: int) -> list[dict[str, Any]]:
    """Questions of which no two begin alike, so that no prefix cache shortens them."""
    texts = [task.format(topic) for topic, task in product(_TOPICS, _TASKS)]
    asked = [f"Question {i + 1}: {texts[i % len(texts)]}" for i in range(count)]
    return [{"messages": [{"role": "user", "content": text}]} for text in asked]


async def run_bench(
    url: str,
    baseline: str | None,
    rows: Sequence[Mapping[str, Any]] | None,
    options: BenchOptions,
    on_done: Callable[[], None],
) -> dict[str, Any]:
    """Load a server, and a second one with the same requests if there is one.

    They take turns level by level, so that a machine that slows down slows both.

    Args:
        url: of the server.
        baseline: of the second one: the same target without its draft, as a rule.
        rows: of a prompts file, asked in turn; None = built-in questions.
        options: see there.
        on_done: called after every request that counts.

    Returns:
        JSON-ready: for each level the figures of both and their ratios.

    Raises:
        UserError: a server cannot be used as asked, or none of a level's requests was answered.
    """
    warm_up = max(options.concurrency)
    rows = rows or builtin_rows(options.num_requests + warm_up)
    async with AsyncExitStack() as stack:
        endpoints: dict[str, Endpoint] = {}
        for flag, own in (("--url", url), ("--baseline", baseline)):
            if own is not None:
                endpoints[flag] = await stack.enter_async_context(
                    connect(flag, own, options.model, options.api_key, options.max_seconds)
                )
        first = _short(options.request(rows[0], 0))
        for endpoint in endpoints.values():
            await endpoint.try_out(first)
        levels, done = [], warm_up
        for clients in options.concurrency:
            count = clients * options.requests_per_client
            numbers = range(done, done + count)
            prompts = {i: options.request(rows[i % len(rows)], i) for i in numbers}
            waking = {i: _short(options.request(rows[i % len(rows)], i)) for i in range(clients)}
            done += count
            answers, figures = {}, {}
            for flag, endpoint in endpoints.items():
                await _load(endpoint, waking, clients, options.max_seconds, lambda: None)
                answers[flag], seconds = await _load(
                    endpoint, prompts, clients, options.max_seconds, on_done
                )
                figures[flag] = _checked(endpoint, answers[flag], seconds)
            level: dict[str, Any] = {"concurrency": clients, "figures": figures["--url"]}
            if baseline is not None:
                level["baseline"] = figures["--baseline"]
                level["ratios"] = ratios(figures["--url"], figures["--baseline"])
                if not options.temperature:
                    level["texts"] = same_texts(answers["--url"], answers["--baseline"])
            levels.append(level)
        return {
            "url": url,
            "baseline": baseline,
            "models": {flag.strip("-"): endpoint.model for flag, endpoint in endpoints.items()},
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            "requests_per_client": options.requests_per_client,
            "levels": levels,
        }


async def _load(
    endpoint: Endpoint,
    prompts: Mapping[int, Prompt],
    num_clients: int,
    max_seconds: float,
    on_done: Callable[[], None],
) -> tuple[dict[int, Answer], float]:
    """Answers by number of the request, and the seconds that all of them took."""
    left = iter(prompts.items())
    answers: dict[int, Answer] = {}
    start = perf_counter()

    async def client() -> None:
        for index, prompt in left:  # all clients take from the same
            if perf_counter() - start > max_seconds:
                return
            answers[index] = await endpoint.ask(prompt)
            on_done()

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return answers, perf_counter() - start


def _checked(endpoint: Endpoint, answers: Mapping[int, Answer], seconds: float) -> dict[str, Any]:
    figures = summarise(list(answers.values()), seconds)
    if not figures["requests_per_s"]:
        raise UserError(
            f"{endpoint.name}: none of {len(answers)} requests was answered, the first with: "
            f"{figures['first_error']}"
        )
    return figures


def _short(prompt: Prompt) -> Prompt:
    tokens = min(prompt.body["max_tokens"], _WARM_UP_TOKENS)
    return prompt._replace(body={**prompt.body, "max_tokens": tokens})
