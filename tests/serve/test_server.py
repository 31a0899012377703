"""The HTTP server, with the official client and by hand, over a real model and draft."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from eagle3_core import load_draft
from eagle3_core.target import Target, load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.sampling import SamplingParams
from eagle3_serve.server import EngineWorker, ServerOptions
from eagle3_serve.server.errors import ApiError

SECONDS = 60  # for any one request; a hang fails instead of blocking
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def target(chain_pair: Any) -> Target:
    return load_target(chain_pair.target)


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "draft"])
def server(
    request: pytest.FixtureRequest, chain_pair: Any, target: Target, run_server: Any
) -> Iterator[Any]:
    draft = load_draft(chain_pair.draft, target).draft if request.param else None
    config = EngineConfig(num_speculative_tokens=request.param, max_batch_size=4)
    with run_server(Engine(target, draft, config), target, request.param) as server:
        yield server


class TestCompletions:
    @pytest.mark.parametrize(
        ("options", "text", "tokens", "reason"),
        [
            ({"prompt": "f", "max_tokens": 7}, "ghijklm", 7, "length"),
            ({"prompt": "f", "max_tokens": 1}, "g", 1, "length"),
            ({"prompt": "f", "max_tokens": 20, "stop": ["ij"]}, "gh", 4, "stop"),
            ({"prompt": "f", "max_tokens": 20, "stop": "ghijklmnop"}, "", 10, "stop"),
            ({"prompt": "f", "max_tokens": 20, "stop": ["ij", "h"]}, "g", 2, "stop"),
            ({"prompt": "5", "max_tokens": 20}, "6789", 5, "stop"),
            ({"prompt": "hi!", "max_tokens": 5}, "", 1, "stop"),
            ({"prompt": "😀", "max_tokens": 8}, "😀😀", 8, "length"),
            ({"prompt": "😀", "max_tokens": 6}, "😀", 6, "length"),
            (
                {"prompt": "2", "max_tokens": 12, "extra_body": {"ignore_eos": True}},
                "3456789ABCD",
                12,
                "length",
            ),
            ({"prompt": "c", "extra_body": {"stop_token_ids": [101]}}, "d", 2, "stop"),
            ({"prompt": [ord("x"), ord("f")], "max_tokens": 3}, "ghi", 3, "length"),
        ],
    )
    def test_greedy_text_streamed_and_whole(
        self, server: Any, options: dict[str, Any], text: str, tokens: int, reason: str
    ) -> None:
        client = server.client
        whole = client.completions.create(model=server.model, temperature=0, **options)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, reason)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == tokens
        assert whole.usage.total_tokens == tokens + whole.usage.prompt_tokens
        stream = client.completions.create(
            model=server.model,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [reason]
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == tokens

    def test_a_list_of_prompts_and_n(self, server: Any) -> None:
        answer = server.client.completions.create(
            model=server.model, prompt=["f", [ord("A")]], n=2, max_tokens=2, temperature=0
        )
        assert [(c.index, c.text) for c in answer.choices] == [
            (0, "gh"),
            (1, "gh"),
            (2, "BC"),
            (3, "BC"),
        ]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)

    def test_usage_says_how_speculation_fared(self, server: Any) -> None:
        answer = server.post(
            "/v1/completions", {"prompt": "f", "max_tokens": 16, "temperature": 0}
        ).json()
        speculation = answer["usage"]["speculation"]
        rounds = speculation["num_rounds"]
        # The first token comes with the prompt, the other 15 with the rounds.
        assert speculation["accept_length"] == 15 / rounds
        if server.depth:
            assert rounds == 3  # five tokens a round: the draft is always right from 'g' to 'v'
            assert speculation["num_accepted_tokens"] == speculation["num_drafted_tokens"] == 12
        else:
            assert rounds == 15
            assert speculation["num_drafted_tokens"] == 0

    def test_seeded_choices_repeat_as_a_set_and_differ(self, server: Any) -> None:
        def texts(seed: int | None) -> list[str]:
            answer = server.client.completions.create(
                model=server.model, prompt="f", n=4, max_tokens=12, seed=seed
            )
            return [choice.text for choice in answer.choices]

        assert len(set(texts(3))) == 4
        assert texts(3) == texts(3)
        assert texts(4)[0] == texts(3)[1]  # choice i of seed s is seed s + i
        assert len(set(texts(None))) == 4

    def test_unset_temperature_is_one(self, server: Any) -> None:
        """top_k alone must sample: after 'c', 'd' with 2/3 and 'e' with 1/3."""
        answer = server.client.completions.create(
            model=server.model, prompt="c", n=64, max_tokens=1, seed=0, extra_body={"top_k": 2}
        )
        assert {choice.text for choice in answer.choices} == {"d", "e"}

    @pytest.mark.parametrize(
        "options",
        [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 0, "top_k": 10**6}],
    )
    def test_edges_that_leave_one_token_are_greedy(
        self, server: Any, options: dict[str, Any]
    ) -> None:
        answer = server.post("/v1/completions", {"prompt": "c", "max_tokens": 6, **options}).json()
        assert answer["choices"][0]["text"] == "defghi"

    def test_null_and_neutral_values_mean_the_default(self, server: Any) -> None:
        body = {
            "prompt": "f",
            "max_tokens": 3,
            "temperature": 0,
            "top_p": None,
            "stop": None,
            "seed": None,
            "logit_bias": {},
            "presence_penalty": 0.0,
            "echo": False,
            "best_of": 1,
            "top_k": -1,
            "user": "somebody",
        }
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "ghi"


MESSAGES: Any = [{"role": "user", "content": "hello"}]  # the template ends in "\n": 'a' follows


class TestChat:
    def test_answer(self, server: Any, target: Target) -> None:
        answer = server.client.chat.completions.create(
            model=server.model, messages=MESSAGES, temperature=0, max_tokens=5
        )
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", "abcde")
        assert choice.finish_reason == "length"
        rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(target.tokenizer(rendered)["input_ids"])

    def test_an_earlier_answer_can_be_sent_back_as_the_client_holds_it(self, server: Any) -> None:
        client = server.client
        first = client.chat.completions.create(
            model=server.model, messages=MESSAGES, temperature=0, max_tokens=2
        )
        parts = [{"type": "text", "text": "and "}, {"type": "text", "text": "then?"}]
        second = client.chat.completions.create(
            model=server.model,
            messages=[
                *MESSAGES,
                first.choices[0].message.model_dump(),
                {"role": "user", "content": parts},
            ],
            temperature=0,
            max_completion_tokens=4,
        )
        assert second.choices[0].message.content == "abcd"

    def test_stream_protocol(self, server: Any) -> None:
        chunks = list(
            server.client.chat.completions.create(
                model=server.model,
                messages=MESSAGES,
                temperature=0,
                max_tokens=9,
                n=2,
                stream=True,
            )
        )
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
        assert all(chunk.usage is None for chunk in chunks)
        for index in (0, 1):
            mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
            assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
            assert "".join(c.delta.content or "" for c in mine) == ALPHABET[:9]
            assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["length"]

    def test_raw_stream_ends_with_usage_and_done(self, server: Any) -> None:
        body = {
            "messages": MESSAGES,
            "temperature": 0,
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        response = server.post("/v1/chat/completions", body)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.text.removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        *others, usage = (json.loads(event.removeprefix("data: ")) for event in events[:-1])
        assert all(chunk["usage"] is None for chunk in others)
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)

    def test_text_is_utf8_and_never_half_a_character(self, server: Any) -> None:
        response = server.post(
            "/v1/completions",
            {"prompt": "😀", "temperature": 0, "max_tokens": 16, "stream": True},
        )
        events = [json.loads(e[6:]) for e in response.text.split("\n\n")[:-2]]
        assert "".join(e["choices"][0]["text"] for e in events) == "😀" * 4
        assert "\ufffd" not in response.text


@pytest.mark.parametrize("server", [4], indirect=True, ids=["draft"])
class TestModels:
    def test_list_and_retrieve(self, server: Any) -> None:
        models = server.client.models
        assert [m.id for m in models.list()] == [server.model]
        assert models.retrieve(server.model).id == server.model

    def test_another_model_is_not_found(self, server: Any) -> None:
        with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
            server.client.completions.create(model="gpt-4", prompt="f")

    def test_health(self, server: Any) -> None:
        assert server.http.get("/health").json() == {"status": "ok"}


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BAD_BODIES = [
    ({"prompt": "f", "n": 10**9}, "n", "128"),
    ({"prompt": "f", "n": 0}, "n", "greater than or equal to 1"),
    ({"prompt": "f", "n": True}, "n", "integer"),
    ({"prompt": "f", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"prompt": "f", "max_tokens": "7"}, "max_tokens", "integer"),
    ({"prompt": "f", "temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"prompt": "f", "temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"prompt": "f", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "f", "top_k": -2}, "top_k", "-1"),
    ({"prompt": "f", "seed": 2**64}, "seed", "less than"),
    ({"prompt": "f", "stream": "yes"}, "stream", "boolean"),
    ({"prompt": "f", "stop": [""]}, "stop", "empty"),
    ({"prompt": "f", "stop": [1]}, "stop", "string"),
    ({"prompt": "f", "stop": ["a"] * 17}, "stop", "at most 16"),
    ({"prompt": "f", "stream_options": {}}, "stream_options", "stream"),
    ({"prompt": "f", "temprature": 0}, "temprature", "did you mean 'temperature'"),
    ({"prompt": "f", "frobnicate": 0}, "frobnicate", "unknown"),
    ({"prompt": "f", "logit_bias": {"272": 1}}, "logit_bias", "272 is not in 0..271"),
    ({"prompt": "f", "logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
    ({"prompt": "f", "logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
    ({"prompt": "f", "logit_bias": [5]}, "logit_bias", "an object"),
    ({"prompt": "f", "min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"prompt": "f", "repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"prompt": "f", "presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    ({"prompt": "f", "min_tokens": 5, "max_tokens": 4}, "min_tokens", "above max_tokens, 4"),
    ({"prompt": "f", "echo": True, "logprobs": 1}, "logprobs", "not with echo"),
    ({"prompt": "f", "suffix": "x"}, "suffix", "not supported"),
    ({"prompt": "f", "best_of": 2}, "best_of", "not supported"),
    ({"prompt": "f", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"prompt": "f", "logprobs": True}, "logprobs", "integer"),
    (
        {"prompt": "f", "structured_outputs": {"regex": "("}},
        "structured_outputs",
        "unclosed group",
    ),
    ({"prompt": "f", "structured_outputs": {}}, "structured_outputs", "give one"),
    (
        {"prompt": "f", "structured_outputs": {"regex": "a"}, "ignore_eos": True},
        "ignore_eos",
        "no meaning with structured_outputs",
    ),
    ({}, "prompt", "required"),
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": []}, "prompt", "must be"),
    ({"prompt": 5}, "prompt", "must be"),
    ({"prompt": ["f", 5]}, "prompt", "must be"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [272]}, "prompt", "272 is not in 0..271"),
    ({"prompt": [-1]}, "prompt", "-1 is not in"),
    ({"prompt": ["f"] * 65, "n": 2}, "n", "more than 128"),
    ({"prompt": "f", "stop_token_ids": [272]}, "stop_token_ids", "272 is not in 0..271"),
    ({"prompt": "f", "stop_token_ids": [-1]}, "stop_token_ids", "-1 is not in"),
]
BAD_CHATS = [
    ({}, "messages", "required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'user'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    ({"messages": ["hi"]}, "messages.0", "'hi'"),
    ({"messages": [{"role": "user", "content": "x", "nick": 1}]}, "messages.0.nick", "unknown"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content",
        "only text",
    ),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]},
        "messages",
        "system comes first",
    ),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools.0.function", "required"),
    ({"messages": MESSAGES, "tools": [TOOL]}, "tools", "--tool-call-parser"),
    ({"messages": MESSAGES, "tools": [TOOL, TOOL]}, "tools", "same name"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", "there are no tools"),
    (
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto?"},
        "tool_choice",
        "must be none, auto, required or",
    ),
    (
        {
            "messages": MESSAGES,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "other"}},
        },
        "tool_choice",
        "'other' is none of the tools",
    ),
    (
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"},
        "tools",
        "no place for them",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "goes with role 'tool'"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "only allowed with logprobs"),
    ({"messages": MESSAGES, "logprobs": 1}, "logprobs", "boolean"),
    (
        {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
        "response_format",
        "json_schema goes with type",
    ),
    (
        {
            "messages": MESSAGES,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "frob"}},
            },
        },
        "response_format",
        "Invalid type: frob",
    ),
    (
        {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2},
        "max_completion_tokens",
        "give one",
    ),
]


@pytest.mark.parametrize("server", [4], indirect=True, ids=["draft"])
class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "param", "words"),
        [("/v1/completions", *row) for row in BAD_BODIES]
        + [("/v1/chat/completions", *row) for row in BAD_CHATS],
    )
    def test_400_names_the_field(
        self, server: Any, path: str, body: dict[str, Any], param: str, words: str
    ) -> None:
        response = server.post(path, body)
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert error["param"] == param, error
        assert words in error["message"]
        assert "\n" not in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"

    @pytest.mark.parametrize(
        ("content", "status", "words"),
        [
            (b"", 400, "JSON object"),
            (b"{", 400, "not JSON"),
            (b'{"prompt": "f",}', 400, "not JSON"),
            (b"[1, 2]", 400, "JSON object"),
            (b'"text"', 400, "JSON object"),
            (b"\xff\xfe", 400, "not JSON"),
            (b'{"prompt": "\xe9"}', 400, "as JSON"),
            (b"[" * 200_000, 400, "as JSON"),
            (b'{"prompt": "f", "temperature": NaN}', 400, "finite"),
            (b'{"prompt": "\\ud83d"}', 400, "surrogate"),
            (b'{"prompt": "f", "stop": "\\ud83d"}', 400, "stop: holds an unpaired surrogate"),
            (b'{"prompt": "f", "\\ud83d": 1}', 400, "surrogate"),
            (b'{"prompt": "f", "user": "\\ud83d"}', 400, "user: holds an unpaired surrogate"),
            (b'{"prompt": "f", "stream_options": {"\\ud83d": 1}}', 400, "stream_options: holds"),
            (b'{"prompt": "f", "metadata": {"k": ["\\ud83d"]}}', 400, "metadata: holds"),
            (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "prompt: must be"),
            (b'{"prompt": "f", "seed": ' + b"9" * 5000 + b"}", 400, "as JSON"),
            (b'{"prompt": "' + b"x" * 2**24 + b'"}', 413, "larger than"),
        ],
    )
    def test_bodies_that_are_no_request(
        self, server: Any, content: bytes, status: int, words: str
    ) -> None:
        response = server.http.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == status
        assert words in response.json()["error"]["message"]
        assert server.http.get("/health").status_code == 200

    def test_wrong_method_and_unknown_path(self, server: Any) -> None:
        wrong_method = server.http.get("/v1/completions")
        assert wrong_method.status_code == 405
        assert wrong_method.headers["allow"] == "POST"
        assert "GET /v1/completions" in wrong_method.json()["error"]["message"]
        nowhere = server.post("/v1/nowhere", {})
        assert nowhere.status_code == 404
        assert "/v1/nowhere" in nowhere.json()["error"]["message"]

    @pytest.mark.parametrize(("length", "room"), [(251, 5), (255, 1), (256, None), (258, None)])
    def test_context_limit(self, server: Any, length: int, room: int | None) -> None:
        """256 positions: a prompt must leave room for a token, and the answer is cut to fit."""
        response = server.post("/v1/completions", {"prompt": "a" * length, "temperature": 0})
        if room is None:
            message = response.json()["error"]["message"]
            assert response.status_code == 400
            assert str(length) in message
            assert "256" in message
        else:
            answer = response.json()
            assert answer["choices"][0]["text"] == ALPHABET[1 : 1 + room]
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == room

    def test_a_refused_stream_has_a_status(self, server: Any) -> None:
        response = server.post("/v1/completions", {"prompt": "a" * 300, "stream": True})
        assert response.status_code == 400


class TestConcurrency:
    def test_clients_do_not_touch_each_other(self, server: Any) -> None:
        """More clients than batch slots, of different lengths, some streaming."""

        def ask(i: int) -> str:
            client = server.client
            options: dict[str, Any] = {"temperature": 0, "max_tokens": 3 + i}
            prompt = ALPHABET[i]
            if i % 2:
                return (
                    client.completions.create(model=server.model, prompt=prompt, **options)
                    .choices[0]
                    .text
                )
            stream = client.completions.create(
                model=server.model, prompt=prompt, stream=True, **options
            )
            return "".join(chunk.choices[0].text for chunk in stream)

        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(ask, range(12)))
        assert texts == [(ALPHABET * 2)[i + 1 : i + 4 + i] for i in range(12)]


def test_api_key_guards_the_api_but_not_health(target: Target, run_server: Any) -> None:
    engine = Engine(target, None, EngineConfig(num_speculative_tokens=0))
    with run_server(engine, target, options=ServerOptions(api_key="secret")) as server:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            server.client.with_options(api_key="wrong").models.list()
        response = server.http.post("/v1/completions", content=b"{")
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert server.client.with_options(api_key="secret").models.list().data[0].id == server.model
        assert server.http.get("/health").status_code == 200


class _Slow(Engine):
    """Takes its time, and counts rounds."""

    num_rounds = 0

    def step(self) -> Any:
        time.sleep(0.02)
        self.num_rounds += 1
        return super().step()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_slots(
    target: Target, run_server: Any, stream: bool
) -> None:
    """Two endless requests fill the batch and two wait; their client goes away."""
    engine = _Slow(target, None, EngineConfig(num_speculative_tokens=0, max_batch_size=2))
    body = {"prompt": "a", "n": 4, "max_tokens": 250, "stream": stream, "temperature": 0}
    with run_server(engine, target) as server:
        if stream:
            with server.http.stream("POST", "/v1/completions", json=body) as response:
                assert next(response.iter_lines()).startswith("data: ")
        else:
            timeout = httpx.Timeout(SECONDS, read=0.2)
            with pytest.raises(httpx.ReadTimeout):
                server.http.post("/v1/completions", json=body, timeout=timeout)
        server.settle()
        assert engine.num_rounds < 250, "the requests ran to their end"
        answer = server.post("/v1/completions", {"prompt": "f", "max_tokens": 2, "temperature": 0})
        assert answer.json()["choices"][0]["text"] == "gh"


class _Breaks(Engine):
    """Fails in the round after `broken` is set, once."""

    broken = False

    def step(self) -> Any:
        if self.broken:
            self.broken = False
            raise RuntimeError("a fault on purpose")
        return super().step()


def test_a_failed_round_is_a_500_and_the_server_lives_on(target: Target, run_server: Any) -> None:
    engine = _Breaks(target, None, EngineConfig(num_speculative_tokens=0))
    body = {"prompt": "f", "max_tokens": 2, "temperature": 0}
    with run_server(engine, target) as server:
        engine.broken = True
        response = server.post("/v1/completions", body)
        assert response.status_code == 500
        assert "fault on purpose" not in response.text
        engine.broken = True
        events = server.post("/v1/completions", body | {"stream": True}).text
        assert "server_error" in events
        assert "[DONE]" not in events
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "gh"


def test_stopping_fails_what_runs_and_refuses_what_comes(target: Target) -> None:
    engine = Engine(target, None, EngineConfig(num_speculative_tokens=0))

    async def scenario() -> None:
        worker = EngineWorker(engine)
        worker.start()
        job = ([ord("a")], SamplingParams(max_tokens=250, temperature=0.0))
        submission = await worker.submit([job])
        await worker.stop()
        with pytest.raises(ApiError, match="shutting down"):
            async for _ in submission.outputs():
                pass
        late = asyncio.create_task(worker.submit([job]))
        await asyncio.sleep(0)
        await worker.stop()
        with pytest.raises(ApiError, match="shutting down"):
            await late

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))
    assert not engine.has_work
