"""`eagle3-serve bench`: what it counts, against this server and against ones that say less."""

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from eagle3_core import load_draft
from eagle3_core.target import Target, load_target
from eagle3_serve.bench.client import Answer, Arrival
from eagle3_serve.bench.figures import summarise
from eagle3_serve.bench.load import builtin_rows
from eagle3_serve.cli import main
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.server import ServerOptions

SECONDS = 60


def chunk(text: str | None = None, tokens: int | None = None, reason: str | None = None) -> Any:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}}
    usage = None if tokens is None else {"completion_tokens": tokens}
    return {"choices": [choice | {"finish_reason": reason}], "usage": usage}


def answer(*chunks: tuple[float, Any]) -> Answer:
    own = Answer()
    for seconds, body in chunks:
        own.read(body, seconds)
    return own


LAST = {"choices": [], "usage": {"completion_tokens": 7}}


class TestGaps:
    """One token, then two after 3 s, then four after 2 s: rounds of a draft."""

    def test_a_server_that_counts_in_every_chunk(self) -> None:
        own = answer(
            (0.5, chunk("", 0)),  # opens the answer, no token
            (1.0, chunk("a", 1)),
            (4.0, chunk("bc", 3)),
            (4.5, chunk("!", 3)),  # text that was held back: no token
            (6.0, chunk(None, 7, "stop")),  # an end token, in a round of four
            (6.5, LAST),
        )
        assert own.arrivals == [Arrival(1.0, 1), Arrival(4.0, 3), Arrival(6.0, 7)]
        assert own.token_gaps == [1.5, 1.5, 0.5, 0.5, 0.5, 0.5]
        assert own.chunk_gaps == [3.0, 2.0]
        assert (own.num_tokens, own.text, own.is_whole) == (7, "abc!", True)

    def test_a_server_that_counts_at_the_end(self) -> None:
        own = answer(
            (0.5, chunk("")),
            (1.0, chunk("a")),
            (4.0, chunk("bc")),
            (6.0, chunk("defg")),
            (6.1, chunk(None, None, "stop")),
            (6.5, LAST),
        )
        # Six tokens in two chunks, three each in the mean; they add up to five seconds.
        assert own.token_gaps == [1.0, 2.0 / 3]
        assert own.chunk_gaps == [3.0, 2.0]
        assert sum(own.token_gaps) * 3 == 5.0

    def test_counts_in_the_last_chunk_alone_are_not_of_a_chunk(self) -> None:
        own = answer((1.0, chunk("a")), (2.0, chunk("b")), (2.1, chunk("", 2, "stop")))
        assert (own.chunk_gaps, own.num_tokens, own.has_chunk_counts) == ([1.0], 2, False)

    def test_a_server_that_does_not_count(self) -> None:
        own = answer((1.0, chunk("a")), (2.0, chunk("b")), (4.0, chunk("c", None, "length")))
        assert (own.num_tokens, own.token_gaps) == (3, [1.0, 2.0])

    def test_completions_reasoning_and_calls_are_output(self) -> None:
        delta = {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
        own = answer(
            (1.0, {"choices": [{"text": "a", "finish_reason": None}]}),
            (2.0, {"choices": [{"delta": {"reasoning_content": "b"}}]}),
            (3.0, {"choices": [{"delta": delta, "finish_reason": "tool_calls"}]}),
        )
        assert (own.text, len(own.arrivals)) == ("abf{}", 3)


def test_figures_of_a_level() -> None:
    whole = [answer(*((float(i + k), chunk("x", i)) for i in range(1, 4))) for k in range(5)]
    for k, own in enumerate(whole):
        own.usage = {
            "completion_tokens": 3,
            "prompt_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": k},
            "speculation": {"num_rounds": k, "accept_length": 2.0},
        }
    failed = answer((9.0, {"error": {"message": "out of\nluck"}}))
    figures = summarise([*whole, failed], 5.0)
    assert (figures["requests_per_s"], figures["tokens_per_s"]) == (1.0, 3.0)
    assert (figures["num_requests"], figures["errors"]) == (6, {"error in the stream": 1})
    assert figures["first_error"] == "out of luck"
    assert figures["ttft_ms"] == pytest.approx({"mean": 3000, "p50": 3000, "p99": 4960})
    assert figures["inter_token_ms"] == {"mean": 1000, "p50": 1000, "p99": 1000}
    assert (figures["num_prompt_tokens"], figures["num_cached_tokens"]) == (50, 10)
    assert (figures["accept_length"], figures["tokens_per_chunk"]) == (2.0, 1.0)
    nothing = summarise([failed], 5.0)
    assert (nothing["ttft_ms"], nothing["accept_length"], nothing["tokens_per_s"]) == (
        None,
        None,
        0,
    )


def test_no_two_questions_begin_alike() -> None:
    texts = [row["messages"][0]["content"] for row in builtin_rows(300)]
    assert len({text[:12] for text in texts}) == 300


@pytest.fixture(scope="module")
def target(chain_pair: Any) -> Target:
    return load_target(chain_pair.target)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [{"prompt": letter} for letter in "fgh"]
    rows += [{"messages": [{"role": "user", "content": "hello"}]}]  # type: ignore[dict-item]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["bench", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


class TestThisServer:
    def test_beside_a_baseline(
        self,
        chain_pair: Any,
        target: Target,
        run_server: Any,
        prompts: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """From 'f', 'g' and 'h' and from the template's newline on the draft is often right."""
        options = ServerOptions(api_key="secret")
        draft = load_draft(chain_pair.draft, target).draft
        config = EngineConfig(num_speculative_tokens=4, max_batch_size=2)
        with (
            run_server(Engine(target, draft, config), target, 4, options) as ours,
            run_server(Engine(target, None, EngineConfig()), target, 0, options) as plain,
        ):
            arguments = ["--url", ours.url, "--baseline", f"{plain.url}/v1/", "--api-key", "secret"]
            arguments += ["--prompts", prompts, "--max-tokens", "16", "--concurrency", "1", "3"]
            results = bench(capsys, *arguments)
            assert main(["bench", *arguments[:-2], "2"]) == 0
            table = capsys.readouterr().out
        assert results["models"] == {"url": target.name, "baseline": target.name}
        assert [level["concurrency"] for level in results["levels"]] == [1, 3]
        for level, count in zip(results["levels"], (4, 12), strict=True):
            figures, baseline = level["figures"], level["baseline"]
            for own in (figures, baseline):
                assert (own["num_requests"], own["errors"]) == (count, {})
                assert own["num_output_tokens"] == 16 * count
                assert own["tokens_counted_by"] == "usage of each chunk"
            assert figures["accept_length"] > 2
            assert figures["tokens_per_chunk"] > 2
            assert (baseline["accept_length"], baseline["tokens_per_chunk"]) == (1.0, 1.0)
            # Fifteen gaps an answer, whatever the chunks.
            assert baseline["inter_token_ms"]["mean"] == baseline["inter_chunk_ms"]["mean"]
            assert figures["inter_token_ms"]["mean"] < figures["inter_chunk_ms"]["mean"]
            assert level["texts"] == {"num_same": count, "num_compared": count}
            ratio = figures["tokens_per_s"] / baseline["tokens_per_s"]
            assert level["ratios"]["tokens_per_s"] == ratio
        assert "8 of 8 answers are the baseline's" in table

    def test_errors_are_counted_and_the_others_go_on(
        self, target: Target, run_server: Any, prompts: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = EngineConfig(max_batch_size=1, max_queue_size=1)
        with run_server(Engine(target, None, config), target) as server:
            arguments = ["--url", server.url, "--prompts", prompts, "--concurrency", "8"]
            (level,) = bench(capsys, *arguments)["levels"]
        figures = level["figures"]
        assert list(figures["errors"]) == ["503"]
        assert "requests are waiting" in figures["first_error"]
        assert figures["num_requests"] == 32 > figures["errors"]["503"]

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            (["--model", "other"], "the first request failed: 404: model: 'other' is not served"),
            (["--api-key", "wrong"], "/v1/models says 401: a valid API key is required"),
            (["--max-tokens", "3", "--prompts", "{long}"], "failed: 400: prompt: is 300 tokens"),
            (["--prompts", "nowhere"], "nowhere: cannot be read"),
        ],
    )
    def test_what_cannot_work_is_one_line(
        self,
        target: Target,
        run_server: Any,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        more: list[str],
        words: str,
    ) -> None:
        long = tmp_path / "long.jsonl"
        long.write_text(json.dumps({"prompt": "a" * 300}))
        more = [part.format(long=long) for part in more]
        options = ServerOptions(api_key="secret")
        with run_server(Engine(target, None, EngineConfig()), target, 0, options) as server:
            key = [] if "--api-key" in more else ["--api-key", "secret"]
            assert main(["bench", "--url", server.url, *key, *more]) == 2
        one_line(capsys, words)


def one_line(capsys: pytest.CaptureFixture[str], words: str) -> None:
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("eagle3-serve: ")
    assert words in last
    assert (printed.out, "Traceback" in printed.err) == ("", False)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", "expected an address that begins with http:// or https://"),
        ("http://host:port", "is no address"),
        ("http://127.0.0.1:{port}", "cannot be reached"),
    ],
)
def test_a_server_that_is_not_there(
    capsys: pytest.CaptureFixture[str], url: str, words: str
) -> None:
    with socket.socket() as probe:  # bound, so that nobody else listens there
        probe.bind(("127.0.0.1", 0))
        url = url.format(port=probe.getsockname()[1])
        assert main(["bench", "--url", url]) == 2
    one_line(capsys, words)


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """A server of another make; its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + SECONDS
        while not server.started:
            assert time.monotonic() < end
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


def other_server(events: list[str], models: int = 1, knows: tuple[str, ...] = ()) -> FastAPI:
    """Answers every request with the same events; refuses stream options but those it knows."""
    app = FastAPI()

    @app.get("/v1/models")
    def _() -> Any:
        return {"data": [{"id": f"m{i}"} for i in range(models)]}

    @app.post("/v1/chat/completions")
    async def _(request: Request) -> Any:
        body = await request.json()
        if set(body.get("stream_options", ())) - set(knows):
            return JSONResponse({"detail": "unknown stream option"}, 422)

        async def stream() -> AsyncIterator[str]:
            for event in events:
                yield event

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


def sent(*chunks: Any) -> list[str]:
    return [f"data: {json.dumps(one, ensure_ascii=False)}\r\n\r\n" for one in chunks]


TEXT = sent(chunk(""), chunk("a\u2028b"), chunk("c"), chunk(None, None, "stop"))
LEVEL = ["--concurrency", "2", "--requests-per-client", "2"]


class TestOtherServers:
    @pytest.mark.parametrize(
        ("events", "knows", "tokens", "counted"),
        [
            ([*TEXT, ": comment\n\n", "data: [DONE]\n\n"], (), 2, "chunks"),
            ([*TEXT, *sent(LAST), "data: [DONE]\n\n"], ("include_usage",), 7, "usage"),
        ],
    )
    def test_they_are_asked_for_what_they_know(
        self,
        capsys: pytest.CaptureFixture[str],
        events: list[str],
        knows: tuple[str, ...],
        tokens: int,
        counted: str,
    ) -> None:
        with served(other_server(events, knows=knows)) as url:
            (level,) = bench(capsys, "--url", url, *LEVEL)["levels"]
        figures = level["figures"]
        assert (figures["num_requests"], figures["errors"]) == (4, {})
        assert (figures["num_output_tokens"], figures["tokens_counted_by"]) == (tokens * 4, counted)
        assert figures["accept_length"] is None

    @pytest.mark.parametrize(
        ("events", "models", "words"),
        [
            (TEXT, 2, "serves ['m0', 'm1'], expected one: give --model"),
            (TEXT[:2], 1, "the first request failed: broken stream"),
            ([*TEXT[:2], "data: {oops\n\n"], 1, "error in the stream: {oops"),
        ],
    )
    def test_what_is_wrong_with_them_is_said(
        self, capsys: pytest.CaptureFixture[str], events: list[str], models: int, words: str
    ) -> None:
        with served(other_server(events, models)) as url:
            assert main(["bench", "--url", url, *LEVEL]) == 2
        one_line(capsys, words)

    def test_one_that_hangs_is_waited_for_no_longer_than_allowed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        app = FastAPI()
        release = threading.Event()

        @app.post("/v1/chat/completions")
        def _() -> None:
            release.wait(SECONDS)

        with served(app) as url:
            arguments = ["--url", url, "--model", "m", "--max-seconds", "0.2"]
            assert main(["bench", *arguments]) == 2
            release.set()
        one_line(capsys, "the first request failed: timeout: took longer than 0.2 s")
