"""The eagle3-serve command as a user runs it: output, files, exit status."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from eagle3_core import Eagle3Draft, load_draft, save_draft
from eagle3_core.vocab import vocab_map
from eagle3_serve.cli import build_parser, main
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine

COMMAND = [str(Path(sys.executable).with_name("eagle3-serve"))]
SECONDS = 300  # bound on anything that waits; a busy machine takes a minute to import torch


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "f", "id": 7},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt": "5"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def generate(chain_pair: Any, prompts: Path, out: Path, *more: str) -> int:
    arguments = ["generate", str(chain_pair.target), "--prompts", str(prompts), "--out", str(out)]
    return main([*arguments, *more])


class TestGenerate:
    @pytest.mark.parametrize("depth", [None, 0, 1, 4])
    def test_rows_keep_their_order_and_their_keys(
        self,
        chain_pair: Any,
        prompts: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        depth: int | None,
    ) -> None:
        """The same file with any draft depth and without a draft; figures on stdout as JSON."""
        out = tmp_path / "out.jsonl"
        more = ["--json", "--max-tokens", "8"]
        if depth is not None:
            more += ["--draft", str(chain_pair.draft), "--num-speculative-tokens", str(depth)]
        assert generate(chain_pair, prompts, out, *more) == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["text"] for row in rows] == ["ghijklmn", "abcdefgh", "6789"]
        assert [row["finish_reason"] for row in rows] == ["length", "length", "stop"]
        assert [len(row["token_ids"]) for row in rows] == [8, 8, 5]
        assert rows[0]["id"] == 7
        assert rows[0]["num_prompt_tokens"] == 1
        assert rows[1]["messages"] == [{"role": "user", "content": "hello"}]
        figures = json.loads(capsys.readouterr().out)
        assert figures["num_output_tokens"] == 21
        assert len(figures["accepted_per_position"]) == (depth or 0)
        assert figures["accept_length"] >= 1
        assert figures["tokens_per_s"] > 0
        assert list(tmp_path.iterdir()) in ([out, prompts], [prompts, out])

    def test_limits_reach_the_engine(
        self,
        chain_pair: Any,
        prompts: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        limits = {"max_model_len": 64, "kv_cache_gib": 0.5, "page_size": 4}
        limits["max_num_batched_tokens"] = 5
        built: list[EngineConfig] = []
        start = Engine.__init__

        def watched(self: Engine, target: Any, draft: Any, config: EngineConfig) -> None:
            built.append(config)
            start(self, target, draft, config)

        monkeypatch.setattr(Engine, "__init__", watched)
        more = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
        assert generate(chain_pair, prompts, tmp_path / "out.jsonl", *more) == 0
        assert {name: getattr(built[0], name) for name in limits} == limits

    def test_seeds_repeat_and_rows_differ(
        self, chain_pair: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "f"}\n' * 4)
        texts = []
        for batch in ("1", "4"):
            out = tmp_path / f"{batch}.jsonl"
            more = ["--temperature", "1", "--seed", "5", "--max-tokens", "12"]
            assert generate(chain_pair, prompts, out, *more, "--max-batch-size", batch) == 0
            texts.append([json.loads(line)["text"] for line in out.read_text().splitlines()])
        assert texts[0] == texts[1]
        assert len(set(texts[0])) == 4
        assert "tokens/s" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, "cannot be read"),
            (b"", "has no rows"),
            (b"\n \n", "has no rows"),
            (b'{"prompt": "f"}\nnot json\n', ":2: is not JSON"),
            (b'{"prompt": "f"}\n\n[1]\n', ":3: holds a list, expected an object"),
            (b'{"text": "f"}\n', ":1: has neither of prompt and messages"),
            (b'{"prompt": "f", "messages": []}\n', ":1: has both of prompt and messages"),
            (b'{"prompt": 5}\n', ":1: prompt is a number, expected a string"),
            (b'{"prompt": ""}\n', ":1: prompt: is empty"),
            (b'{"prompt": "\\ud83d"}\n', ":1: prompt: holds an unpaired surrogate"),
            (b'{"messages": []}\n', ":1: messages is an empty list"),
            (b'{"messages": ["x"]}\n', ":1: messages[0] is a string, expected an object"),
            (b'{"messages": [{"role": "user"}]}\n', ":1: messages[0].content is missing"),
            (
                b'{"messages": [{"role": "user", "content": "a"}, '
                b'{"role": "system", "content": "b"}]}\n',
                "system comes first",
            ),
            (b"\xff{}\n", "is not UTF-8"),
            (b'{"prompt": "f"}\n{"prompt": "' + b"a" * 300 + b'"}\n', ":2: prompt: is 300 tokens"),
        ],
    )
    def test_bad_prompts_write_nothing(
        self,
        chain_pair: Any,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        content: bytes | None,
        words: str,
    ) -> None:
        prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        if content is not None:
            prompts.write_bytes(content)
        assert generate(chain_pair, prompts, out) == 2
        self._one_line(capsys, words)
        assert not out.exists()

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            (["--draft", "nowhere"], "nowhere"),
            (["--num-speculative-tokens", "2"], "needs a draft"),
            (["--max-model-len", "257"], "max_model_len is 257, but the target"),
            (["--kv-cache-gib", "1e-6"], "kv_cache_gib is 1e-06, room for 0 tokens"),
            (["--out", "."], "is a directory"),
            (["--out", "no/such/folder/out.jsonl"], "is not a directory"),
            (["--out", os.devnull], "is not a regular file"),
            (["--out", "x" * 250], "cannot be written"),  # with the suffix of a partial file: > 255
        ],
    )
    def test_bad_arguments_write_nothing(
        self,
        chain_pair: Any,
        prompts: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        more: list[str],
        words: str,
    ) -> None:
        assert generate(chain_pair, prompts, tmp_path / "out.jsonl", *more) == 2
        self._one_line(capsys, words)
        assert list(tmp_path.iterdir()) == [prompts]

    def test_the_prompts_are_not_overwritten(
        self, chain_pair: Any, prompts: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = prompts.read_bytes()
        assert generate(chain_pair, prompts, prompts) == 2
        self._one_line(capsys, "is the file of prompts")
        assert prompts.read_bytes() == before

    def test_a_link_stays_a_link(self, chain_pair: Any, prompts: Path, tmp_path: Path) -> None:
        link, real = tmp_path / "link.jsonl", tmp_path / "real.jsonl"
        link.symlink_to(real)
        assert generate(chain_pair, prompts, link) == 0
        assert link.is_symlink()
        assert len(real.read_text().splitlines()) == len(prompts.read_text().splitlines())

    def test_a_draft_of_another_target(
        self, chain_pair: Any, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One head more in the target's vocabulary; aux states of a layer that it does not have."""
        config = load_draft(chain_pair.draft).config
        for change, words in (
            ({"vocab_size": config.vocab_size + 1}, "vocab_size"),
            ({"target_hidden_size": 64}, "target_hidden_size"),
            ({"aux_layer_ids": (1, 2, 9), "num_target_layers": 9}, "num_target_layers"),
        ):
            foreign = Eagle3Draft(replace(config, **change))
            foreign.init_weights()
            kept = torch.arange(config.draft_vocab_size)
            foreign.d2t, foreign.t2d = vocab_map(kept + 1, foreign.config.vocab_size)
            save_draft(foreign, tmp_path / "foreign")
            out = tmp_path / "out.jsonl"
            assert generate(chain_pair, prompts, out, "--draft", str(tmp_path / "foreign")) == 2
            self._one_line(capsys, words)
            assert not out.exists()

    def test_byte_order_mark_and_unicode_line_separators(
        self, chain_pair: Any, tmp_path: Path
    ) -> None:
        prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        prompts.write_bytes('\ufeff{"prompt": "a\u2028f"}\r\n{"prompt": "x"}'.encode())
        assert generate(chain_pair, prompts, out, "--max-tokens", "2") == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["text"] for row in rows] == ["gh", "yz"]
        assert rows[0]["prompt"] == "a\u2028f"

    @staticmethod
    def _one_line(capsys: pytest.CaptureFixture[str], words: str) -> None:
        printed = capsys.readouterr()
        last = printed.err.strip().splitlines()[-1]
        assert words in last
        assert last.startswith("eagle3-serve: ")
        assert "Traceback" not in printed.err
        assert printed.out == ""


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "required: COMMAND"),
            (["serve"], "required: TARGET"),
            (["serve", "x", "--top-q", "4"], "unrecognized arguments: --top-q 4"),
            (["serve", "x", "--num-speculative-tokens", "-1"], "'-1' is not a whole number >= 0"),
            (["serve", "x", "--max-batch-size", "0"], "'0' is not a whole number >= 1"),
            (["serve", "x", "--max-model-len", "1"], "'1' is not a whole number >= 2"),
            (["serve", "x", "--kv-cache-gib", "inf"], "'inf' is not a number above 0"),
            (["serve", "x", "--page-size", "0"], "'0' is not a whole number >= 1"),
            (["serve", "x", "--max-num-batched-tokens", "1.5"], "'1.5' is not a whole number"),
            (["serve", "x", "--dtype", "int4"], "invalid choice: 'int4'"),
            (["serve", "x", "--api-key", ""], "the key is empty"),
            (["generate", "x"], "required: --prompts, --out"),
            (
                ["generate", "x", "--prompts", "a", "--out", "b", "--temperature", "nan"],
                "'nan' is not a number from 0 to 2",
            ),
        ],
    )
    def test_mistakes_are_one_line(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
    ) -> None:
        with pytest.raises(SystemExit) as stopped:
            build_parser().parse_args(arguments)
        printed = capsys.readouterr()
        assert stopped.value.code == 2
        assert words in printed.err
        assert printed.err.count("\n") == 1

    def test_defaults_are_those_of_the_engine(self) -> None:
        arguments = vars(build_parser().parse_args(["serve", "x"]))
        for field in fields(EngineConfig):
            if arguments.get(field.name) is not None:
                assert arguments[field.name] == field.default, field.name

    @pytest.mark.parametrize("port", ["65536", "-1"])
    def test_port_out_of_range(self, capsys: pytest.CaptureFixture[str], port: str) -> None:
        assert main(["serve", "x", f"--port={port}"]) == 2
        assert f"--port: {port} is not in 0..65535" in capsys.readouterr().err


class TestServe:
    """Starting a process takes seconds, so only one test does; the others serve from this one."""

    def test_a_process_says_when_it_is_ready_and_finishes_requests_at_sigterm(
        self, chain_pair: Any
    ) -> None:
        arguments = ["serve", str(chain_pair.target), "--draft", str(chain_pair.draft)]
        arguments += ["--port", "0", "--api-key", "secret", "--json"]
        process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            texts = self._stream(ready["url"], lambda: process.send_signal(signal.SIGTERM))
            expected = "".join(chr(ord("a") + (6 + i) % 26) for i in range(200))
            assert "".join(texts) == expected
            out, err = process.communicate()
        finally:
            watchdog.cancel()
            process.kill()
        assert process.returncode == 0, err
        assert out == ""  # the one JSON object was read before
        assert f"ready: {ready['url']}/v1" in err
        assert "Traceback" not in err

    def test_a_second_signal_fails_what_still_runs(
        self, chain_pair: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Twenty milliseconds a round: the request would take four seconds."""
        step = Engine.step
        monkeypatch.setattr(Engine, "step", lambda self: time.sleep(0.02) or step(self))
        port = _free_port()
        with _ends_in_time(), ThreadPoolExecutor(1) as pool:
            client = pool.submit(self._interrupt_twice, f"http://127.0.0.1:{port}")
            arguments = ["serve", str(chain_pair.target), "--port", str(port)]
            assert main([*arguments, "--api-key", "secret"]) == 0
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                client.result(SECONDS)

    def test_sigint_ends_an_idle_server_and_a_taken_port_is_one_line(
        self, chain_pair: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        port = _free_port()
        arguments = ["serve", str(chain_pair.target), "--port", str(port)]
        with _ends_in_time(), ThreadPoolExecutor(1) as pool:
            client = pool.submit(self._second_server, f"http://127.0.0.1:{port}", arguments)
            assert main(arguments) == 0
            assert client.result(SECONDS) == 2
        assert f"--port {port}: Address already in use" in capsys.readouterr().err

    @staticmethod
    def _stream(url: str, after_first: Callable[[], None]) -> list[str]:
        client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=SECONDS
        )
        stream = client.completions.create(
            model=client.models.list().data[0].id,
            prompt="f",
            max_tokens=200,
            temperature=0,
            stream=True,
        )
        texts = [next(stream).choices[0].text]
        after_first()
        return texts + [chunk.choices[0].text for chunk in stream]

    @classmethod
    def _interrupt_twice(cls, url: str) -> list[str]:
        def interrupt() -> None:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)  # equal signals that wait together count as one

        _wait_until_healthy(url)
        return cls._stream(url, interrupt)

    @staticmethod
    def _second_server(url: str, arguments: list[str]) -> int:
        _wait_until_healthy(url)
        status = main(arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return status


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _ends_in_time() -> Iterator[None]:
    """Interrupt a server in this process that nobody else has ended."""
    watchdog = threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def _wait_until_healthy(url: str) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            httpx.get(f"{url}/health", timeout=SECONDS).raise_for_status()
        except httpx.ConnectError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(url)
