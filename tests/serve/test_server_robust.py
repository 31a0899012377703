"""What a server has to stand: crowds, clients that leave, faults, signals. Real HTTP throughout."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from eagle3_core import load_draft
from eagle3_core.target import Target, load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine

SECONDS = 120
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def target(chain_pair: Any) -> Target:
    return load_target(chain_pair.target)


def engine_with(target: Target, chain_pair: Any, **config: Any) -> Engine:
    draft = load_draft(chain_pair.draft, target).draft
    return Engine(target, draft, EngineConfig(num_speculative_tokens=4, **config))


def body(letter: str = "a", tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"prompt": letter, "max_tokens": tokens, "temperature": 0, **more}


def expected(letter: str, tokens: int) -> str:
    first = ALPHABET.index(letter) + 1
    return (ALPHABET * 20)[first : first + tokens]


def check_idle(server: Any) -> None:
    """Nothing runs, nothing waits, every page is free, and the server still answers."""
    server.settle()
    engine = server.engine
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert engine.num_free_pages == engine.num_pages
    answer = server.post(PATH, body("f"))
    assert answer.json()["choices"][0]["text"] == "ghij"


def test_a_crowd_on_a_short_queue_is_served_or_told_to_come_back(
    chain_pair: Any, target: Target, run_server: Any
) -> None:
    """500 requests at once, room for 4 and 64 in the queue: each is answered, none hangs."""
    engine = engine_with(target, chain_pair, max_batch_size=4, max_queue_size=64)

    def ask(i: int) -> tuple[int, bool]:
        letter, tokens = ALPHABET[i % 26], 1 + i % 5
        response = client.post(PATH, json=body(letter, tokens))
        if response.status_code == 200:
            return 200, response.json()["choices"][0]["text"] == expected(letter, tokens)
        told = response.json()["error"]["code"] == "queue_full"
        return response.status_code, told and int(response.headers["retry-after"]) >= 1

    with run_server(engine, target) as server:
        limits = httpx.Limits(max_connections=500)
        with (
            httpx.Client(base_url=server.url, timeout=SECONDS, limits=limits) as client,
            ThreadPoolExecutor(100) as pool,
        ):
            outcomes = list(pool.map(ask, range(500)))
        statuses = Counter(status for status, _ in outcomes)
        assert set(statuses) == {200, 503}
        assert statuses[200] >= 68  # batch and queue
        assert all(is_right for _, is_right in outcomes)
        check_idle(server)


def test_clients_that_leave_at_any_time_leave_nothing_behind(
    chain_pair: Any, target: Target, run_server: Any
) -> None:
    """Half of 60 clients go away after 0, 1, 3 or 7 events; the others get the greedy chain."""
    # 16 pages of 1280 bytes a token: so few that requests are preempted too.
    few = 16 * 16 * 1280 / 2**30
    engine = engine_with(target, chain_pair, max_model_len=100, kv_cache_gib=few)

    def ask(i: int) -> bool:
        letter, tokens = ALPHABET[i % 26], 20 + i
        request = body(letter, tokens, stream=True)
        with server.http.stream("POST", PATH, json=request) as response:
            text, events = "", 0
            for line in response.iter_lines():
                if i % 2 and events == (0, 1, 3, 7)[i // 2 % 4]:
                    return True
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    events += 1
        return text == expected(letter, tokens)

    with run_server(engine, target) as server, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(60)))
        check_idle(server)
    assert engine.num_preemptions > 0


def test_a_request_that_takes_too_long_is_a_504_and_the_others_go_on(
    chain_pair: Any, target: Target, run_server: Any
) -> None:
    engine = engine_with(target, chain_pair, request_timeout_s=0.15)
    step = engine.step

    def slow() -> Any:
        time.sleep(0.02)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    with run_server(engine, target) as server:
        late = server.post(PATH, body("a", 250))
        assert late.status_code == 504
        assert "longer than 0.15 s" in late.json()["error"]["message"]
        events = server.post(PATH, body("a", 250, stream=True)).text
        assert "longer than 0.15 s" in events
        assert "[DONE]" not in events
        check_idle(server)


def test_a_fault_in_one_request_leaves_the_others_alone(
    chain_pair: Any, target: Target, run_server: Any
) -> None:
    """A processor that breaks in the middle of a round shared with three healthy requests."""
    engine = engine_with(target, chain_pair)
    build = engine._processor

    class Broken:
        def process(self, logits: torch.Tensor, paths: Any) -> torch.Tensor:
            raise ValueError("a fault on purpose")

    def sometimes(prompt_ids: Any, params: Any, constraint: Any) -> Any:
        return (
            Broken() if params.presence_penalty == 1.25 else build(prompt_ids, params, constraint)
        )

    engine._processor = sometimes  # type: ignore[method-assign]
    with run_server(engine, target) as server, ThreadPoolExecutor(4) as pool:
        healthy = [pool.submit(server.post, PATH, body(letter, 100)) for letter in "bcd"]
        broken = server.post(PATH, body("a", 100, presence_penalty=1.25))
        assert broken.status_code == 500
        for letter, future in zip("bcd", healthy, strict=True):
            assert future.result().json()["choices"][0]["text"] == expected(letter, 100)
        check_idle(server)


def test_what_can_never_fit_is_refused_before_it_waits(
    chain_pair: Any, target: Target, run_server: Any
) -> None:
    engine = engine_with(target, chain_pair, max_model_len=32, max_queue_size=0)
    with run_server(engine, target) as server:
        for request in (body("a" * 32), {"prompt": [5] * 200}):
            response = server.post(PATH, request)
            assert response.status_code == 400
            assert "context limit is 32" in response.json()["error"]["message"]
        check_idle(server)


@pytest.mark.slow
def test_sigterm_under_load_ends_every_request_clearly(chain_pair: Any) -> None:
    """Each request in flight is finished or failed with a reason; the exit status is 0."""
    command = [str(Path(sys.executable).with_name("eagle3-serve")), "serve"]
    command += [str(chain_pair.target), "--port", "0", "--json", "--max-batch-size", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        started, outcomes = threading.Barrier(13), []

        def ask(i: int) -> None:
            stream = bool(i % 2)
            with httpx.Client(timeout=SECONDS) as client:
                started.wait()
                try:
                    response = client.post(url + PATH, json=body("a", 200, stream=stream))
                except httpx.ConnectError:  # came after the door was shut
                    outcomes.append("refused")
                    return
            done = "[DONE]" in response.text if stream else response.status_code == 200
            outcomes.append("done" if done else response.text)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(random.Random(0).uniform(0.05, 0.2))
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(SECONDS)
        assert process.wait(SECONDS) == 0
        assert len(outcomes) == 12
        unclear = [o for o in outcomes if o not in ("done", "refused") and "shutting down" not in o]
        assert unclear == []
        assert "done" in outcomes
    finally:
        process.kill()
        process.communicate()
