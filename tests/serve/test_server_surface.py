"""What requests can ask for beside text: logprobs, grammars, tools, echoes, rounds; the operator's
endpoints."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from eagle3_core import load_draft
from eagle3_core.target import Target, load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.server import ServerOptions
from eagle3_serve.server.tools import HermesReader, Llama3Reader

MESSAGES: Any = [{"role": "user", "content": "hello"}]  # the template ends in "\n": 'a' follows
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
TOOL_TEMPLATE = (
    "{% if tools %}{{ 'tools: ' + tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ m.role + ': ' + m.content }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.arguments.n }}{% endif %}{{ '\\n' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def target(chain_pair: Any) -> Target:
    target = load_target(chain_pair.target)
    target.tokenizer.chat_template = TOOL_TEMPLATE
    return target


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "draft"])
def server(
    request: pytest.FixtureRequest, chain_pair: Any, target: Target, run_server: Any
) -> Iterator[Any]:
    draft = load_draft(chain_pair.draft, target).draft if request.param else None
    config = EngineConfig(num_speculative_tokens=request.param, max_batch_size=4)
    options = ServerOptions(tool_call_parser="hermes")
    with run_server(Engine(target, draft, config), target, request.param, options) as server:
        yield server


def complete(server: Any, **body: Any) -> Any:
    response = server.post("/v1/completions", {"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def events(response: Any) -> list[Any]:
    return [json.loads(event[6:]) for event in response.text.split("\n\n")[:-2]]


class TestSampling:
    def test_parameters_reach_the_engine(self, server: Any) -> None:
        # 'd' follows 'c' with 0.6 and 'e' with 0.3: ln 2 = 0.69 lies between them.
        assert complete(server, prompt="c", max_tokens=1, logit_bias={"100": -0.8})["text"] == "e"
        assert complete(server, prompt="cd", max_tokens=1, repetition_penalty=3.0)["text"] == "e"
        # a prompt's tokens do not count for these
        assert complete(server, prompt="cd", max_tokens=1, presence_penalty=2.0)["text"] == "e"
        assert complete(server, prompt="0", max_tokens=12, min_tokens=11)["text"][:9] == "123456789"
        assert complete(server, prompt="f", max_tokens=3, min_p=1.0, temperature=1)["text"] == "ghi"

    def test_penalties_and_their_paths(self, server: Any) -> None:
        """The four bytes of an emoji cycle; a penalty on what was used breaks the second round."""
        free = complete(server, prompt="😀", max_tokens=8)["text"]
        assert free == "😀😀"
        assert (
            complete(server, prompt="😀", max_tokens=8, frequency_penalty=2.0, presence_penalty=2)[
                "text"
            ]
            != free
        )

    def test_invalid_bytes_do_not_stall_a_stream(self, server: Any) -> None:
        body = {"prompt": "😀", "logit_bias": {"128": -100}, "max_tokens": 12, "temperature": 0}
        whole = complete(server, **body)
        streamed = events(server.post("/v1/completions", body | {"stream": True}))
        assert "".join(e["choices"][0]["text"] for e in streamed) == whole["text"]
        assert whole["finish_reason"] == "length"


class TestLogprobs:
    def test_completion_entries_are_those_of_the_tokens_up_to_the_stop(self, server: Any) -> None:
        body = {"prompt": "f", "stop": ["ij"], "max_tokens": 20, "logprobs": 2}
        choice = complete(server, **body)
        said = choice["logprobs"]
        assert (choice["text"], said["tokens"]) == ("gh", ["g", "h", "i", "j"])
        assert said["text_offset"] == [0, 1, 2, 3]
        assert said["token_logprobs"] == pytest.approx([math.log(0.6)] * 4, abs=1e-4)
        assert list(said["top_logprobs"][0]) == ["g", "h"]
        assert said["top_logprobs"][0]["h"] == pytest.approx(math.log(0.3), abs=1e-4)
        streamed = events(
            server.post("/v1/completions", {"temperature": 0, "stream": True, **body})
        )
        parts = [e["choices"][0]["logprobs"] for e in streamed if e["choices"][0]["logprobs"]]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for part in parts for value in part[key]] == said[key]

    def test_they_are_of_the_logits_after_bias_and_before_temperature(self, server: Any) -> None:
        choice = complete(server, prompt="c", max_tokens=1, logprobs=3, logit_bias={"100": -100})
        said = choice["logprobs"]
        # Without 'd' the others share what it had.
        assert said["token_logprobs"][0] == pytest.approx(math.log(0.3 / 0.4), abs=1e-4)
        cold = complete(server, prompt="c", max_tokens=1, logprobs=0, temperature=0.01, seed=1)
        assert cold["logprobs"]["token_logprobs"] == pytest.approx([math.log(0.6)], abs=1e-4)
        assert cold["logprobs"]["top_logprobs"] == [{}]

    def test_chat_entries_through_the_official_client(self, server: Any) -> None:
        def ask(**options: Any) -> Any:
            return server.client.chat.completions.create(
                model=server.model,
                messages=MESSAGES,
                temperature=0,
                max_tokens=4,
                logprobs=True,
                top_logprobs=2,
                **options,
            )

        content = ask().choices[0].logprobs.content
        assert [entry.token for entry in content] == list("abcd")
        assert [entry.bytes for entry in content] == [[b] for b in b"abcd"]
        assert [top.token for top in content[0].top_logprobs] == ["a", "b"]
        chunks = [chunk.choices[0].logprobs for chunk in ask(stream=True)]
        streamed = [entry for part in chunks if part for entry in part.content]
        assert [entry.token for entry in streamed] == list("abcd")

    def test_an_end_token_has_its_name_and_no_text(self, server: Any) -> None:
        choice = complete(server, prompt="8", max_tokens=4, logprobs=0)
        assert (choice["text"], choice["logprobs"]["tokens"]) == ("9", ["9", "<|eos|>"])

    def test_barred_tokens_are_left_out(self, server: Any) -> None:
        choice = complete(
            server, prompt="f", max_tokens=4, logprobs=5, structured_outputs={"regex": "[xg]y"}
        )
        assert [sorted(top) for top in choice["logprobs"]["top_logprobs"]] == [["g", "x"], ["y"]]


class TestGrammars:
    def test_json_schema_through_the_official_client(self, server: Any) -> None:
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = server.client.chat.completions.create(
            model=server.model, messages=MESSAGES, response_format=form, max_tokens=60, seed=1
        )
        assert list(json.loads(answer.choices[0].message.content)) == ["ok"]
        assert answer.choices[0].finish_reason == "stop"

    @pytest.mark.parametrize(
        ("rules", "expected"),
        [
            ({"regex": "[a-i]{0,9}Z"}, "ghiZ"),
            ({"choice": ["go", "stop"]}, "go"),
            ({"grammar": 'start: "g" x\nx: "h" | "i"'}, "gh"),
            ({"json": {"const": [1]}}, "[1]"),
        ],
    )
    def test_structured_outputs(self, server: Any, rules: Any, expected: str) -> None:
        bias = {str(b): -50 for b in b" \t\n\r"}  # JSON allows white space
        choice = complete(
            server, prompt="f", max_tokens=30, structured_outputs=rules, logit_bias=bias
        )
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")


class TestTools:
    def ask(self, server: Any, **body: Any) -> Any:
        response = server.post(
            "/v1/chat/completions",
            {"messages": MESSAGES, "tools": [TOOL], "temperature": 0, "max_tokens": 80, **body},
        )
        assert response.status_code == 200, response.text
        return response

    @pytest.mark.parametrize(
        "choice", ["required", {"type": "function", "function": {"name": "look"}}]
    )
    def test_a_forced_call_is_valid(self, server: Any, choice: Any) -> None:
        # Numbers and lists of any length would be allowed: end them.
        bias = {str(b): -50 for b in b" \t\n\r-"} | {"125": 30, "93": 30}
        body = {"tool_choice": choice, "logit_bias": bias}
        whole = self.ask(server, **body).json()["choices"][0]
        call = whole["message"]["tool_calls"][0]
        assert (call["type"], call["function"]["name"]) == ("function", "look")
        assert isinstance(json.loads(call["function"]["arguments"])["n"], int)
        assert (whole["message"]["content"], whole["finish_reason"]) == (None, "tool_calls")
        streamed = events(self.ask(server, **body, stream=True))
        deltas = [e["choices"][0] for e in streamed]
        calls = [call for d in deltas for call in d["delta"].get("tool_calls", [])]
        assert [c["function"] for c in calls] == [call["function"]]
        assert calls[0]["index"] == 0
        assert deltas[-1]["finish_reason"] == "tool_calls"

    def test_a_free_answer_stays_text(self, server: Any) -> None:
        choice = self.ask(server, max_tokens=3).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")
        assert "tool_calls" not in choice["message"]

    def test_a_conversation_with_calls_reaches_the_template(self, server: Any) -> None:
        messages = [
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"n": 77}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
        ]
        answer = self.ask(server, messages=messages, max_tokens=2).json()
        assert answer["choices"][0]["message"]["content"] == "ab"


HERMES = '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("reader", "text", "content", "arguments"),
    [
        (HermesReader, HERMES, "", ['{"n": 1}']),
        (HermesReader, f"I look.\n{HERMES}\n{HERMES}\n", "I look.", ['{"n": 1}'] * 2),
        (HermesReader, "a < b and <tool_ but no call \n", "a < b and <tool_ but no call \n", []),
        (HermesReader, "<tool_call>{broken}</tool_call>", "<tool_call>{broken}</tool_call>", []),
        (HermesReader, HERMES + " more", HERMES + " more", []),
        (HermesReader, HERMES[:-3], HERMES[:-3], []),  # cut off by the limit
        (Llama3Reader, '{"name": "look", "parameters": {"n": 1}}', "", ['{"n": 1}']),
        (
            Llama3Reader,
            '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
            "",
            ["{}", "{}"],
        ),
        (Llama3Reader, '{"just": "json"}', '{"just": "json"}', []),
        (Llama3Reader, "text {", "text {", []),
    ],
)
def test_calls_are_told_from_text_however_it_is_split(
    reader: Any, text: str, content: str, arguments: list[str]
) -> None:
    for size in (1, 3, len(text)):
        own = reader()
        shown = "".join(own.push(text[i : i + size]) for i in range(0, len(text), size))
        rest, calls = own.finish()
        assert shown + rest == content
        assert [call["function"]["arguments"] for call in calls] == arguments


class TestMore:
    def test_echo_begins_with_the_prompt(self, server: Any) -> None:
        body = {"prompt": ["f", [ord("A"), ord("B")]], "echo": True, "max_tokens": 2, "n": 2}
        response = server.post("/v1/completions", {"temperature": 0, **body}).json()
        assert [c["text"] for c in response["choices"]] == ["fgh", "fgh", "ABCD", "ABCD"]
        streamed = events(
            server.post("/v1/completions", {"temperature": 0, "stream": True, **body})
        )
        for index, text in enumerate(["fgh", "fgh", "ABCD", "ABCD"]):
            own = [e["choices"][0] for e in streamed if e["choices"][0]["index"] == index]
            assert "".join(c["text"] for c in own) == text

    def test_rounds_say_how_each_token_came_to_be(self, server: Any) -> None:
        body = {"prompt": "c", "max_tokens": 9, "return_rounds": True}
        rounds = complete(server, **body)["rounds"]
        tokens = [token for one in rounds for token in one["tokens"]]
        assert "".join(token["text"] for token in tokens) == "defghijkl"
        assert (tokens[0]["source"], tokens[0]["depth"]) == ("target", 0)  # of the prompt's pass
        if not server.depth:
            assert {token["source"] for token in tokens} == {"target"}
            assert all(one["drafts"] == [] for one in rounds)
            return
        # The draft is wrong after 'e': it proposes '#'.
        first = rounds[1]
        assert [d["text"] for d in first["drafts"]][:2] == ["e", "#"]
        assert [d["accepted"] for d in first["drafts"]][:2] == [True, False]
        assert [d["parent"] for d in first["drafts"]] == list(range(-1, len(first["drafts"]) - 1))
        assert [(t["text"], t["source"], t["depth"]) for t in first["tokens"]] == [
            ("e", "draft", 1),
            ("f", "bonus", 0),
        ]

    def test_usage_has_positions(self, server: Any) -> None:
        body = {"prompt": "f", "max_tokens": 16, "temperature": 0}
        usage = server.post("/v1/completions", body).json()["usage"]
        kept = usage["speculation"]["num_accepted_per_position"]
        assert kept == ([3, 3, 3, 3] if server.depth else [])
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0

    def test_counts_so_far_in_every_chunk_through_the_official_client(self, server: Any) -> None:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = server.client.completions.create(
            model=server.model,
            prompt="f",
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options=options,
        )
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == ([1, 6, 11, 16] if server.depth else list(range(1, 17)))
        assert [chunk.usage.total_tokens for chunk in chunks] == [1 + count for count in counts]
        assert last.usage.completion_tokens == 16
        refused = server.post(
            "/v1/completions",
            {"prompt": "f", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "stream_options"

    def test_metrics_add_up(self, server: Any) -> None:
        def read() -> dict[str, float]:
            lines = server.http.get("/metrics").text.splitlines()
            pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            return {name: float(value) for name, value in pairs}

        server.settle()
        before = read()
        complete(server, prompt="f", max_tokens=16)
        server.settle()
        gained = {name: value - before.get(name, 0.0) for name, value in read().items()}
        assert gained["eagle3_output_tokens_total"] == 16
        assert gained['eagle3_requests_total{finish_reason="length"}'] == 1
        assert gained["eagle3_time_to_first_token_seconds_count"] == 1
        assert gained["eagle3_request_seconds_count"] == 1
        assert gained['eagle3_phase_seconds_total{phase="verify"}'] > 0
        if server.depth:
            assert gained["eagle3_rounds_total"] == 3
            assert gained["eagle3_accepted_tokens_total"] == 12
            assert gained['eagle3_accepted_tokens_per_position_total{position="3"}'] == 3
        now = read()
        assert now["eagle3_requests_running"] == now["eagle3_requests_waiting"] == 0
        assert now["eagle3_kv_pages_used"] == 0

    def test_server_info(self, server: Any) -> None:
        info = server.http.get("/server_info").json()
        assert info["engine"]["num_speculative_tokens"] == server.depth
        assert (info["draft"] is None) == (server.depth == 0)
        assert info["target"]["vocab_size"] == 272
        assert set(info["versions"]) >= {"eagle3-serve", "torch", "transformers"}
        assert info["tool_call_parser"] == "hermes"
        assert info["stats"]["num_output_tokens"] >= 0
