"""Does a server stay right under mixed traffic for a long time?

    python benchmarks/soak.py TARGET [--draft DIR] [--minutes 30] [--clients 12] [--out FILE.json]

Starts `eagle3-serve serve`, then lets clients send what clients send: greedy and seeded answers
that have to repeat exactly, streams that are left half-way, schemas, logprobs, penalties, requests
that are wrong or too long, more at once than the queue takes. Invariants, checked all the time:

- the same request has the same answer, alone or in company, whenever it is asked
- every answer has a status that fits: 200, 400 for the wrong ones, 503 with Retry-After when full
- output under a schema is a document of it; logprobs are as many as tokens
- in the end nothing runs or waits, every page is free, and memory has stopped growing

Exits with 1 if one does not hold.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

QUEUE = 8
TOPICS = ("rivers", "sorting", "bread", "the moon", "a lost key", "prime numbers", "rain", "maps")
SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["word", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}


class Violation(Exception):
    """An invariant does not hold."""


class Soak:
    """The traffic, and what it has shown so far."""

    def __init__(self, url: str) -> None:
        """`url` of the server."""
        self.url = url
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._answers: dict[str, str] = {}
        self._lock = threading.Lock()

    def client(self, seed: int, end: float) -> None:
        """One client's life: random requests, one after the other."""
        draw = random.Random(seed)
        kinds = (self.repeat, self.repeat, self.leave, self.schema, self.logprobs, self.wrong)
        with httpx.Client(base_url=self.url, timeout=300) as http:
            while time.monotonic() < end and not self.problems:
                kind = draw.choice(kinds)
                try:
                    self.counts[f"{kind.__name__}: {kind(http, draw)}"] += 1
                except (Violation, httpx.HTTPError) as error:
                    self.problems.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    def repeat(self, http: httpx.Client, draw: random.Random) -> str:
        """Greedy or seeded, streamed or whole, with any parameters: as it was before."""
        body = {
            **_chat(draw.choice(TOPICS)),
            "temperature": draw.choice([0, 0, 0.8]),
            "seed": draw.randrange(3),
            "max_tokens": draw.choice([1, 8, 40]),
            **draw.choice(
                [{}, {"repetition_penalty": 1.2}, {"top_p": 0.9, "frequency_penalty": 0.5}]
            ),
        }
        stream = draw.random() < 0.5
        response = http.post("/v1/chat/completions", json=body | {"stream": stream})
        if (status := _status(response, {200})) != "200":
            return status
        text = _streamed(response.text) if stream else _text(response)
        key = json.dumps(body, sort_keys=True)
        with self._lock:
            before = self._answers.setdefault(key, text)
        if before != text:
            raise Violation(f"{key} was answered with {before!r} and {text!r}")
        return "same"

    def leave(self, http: httpx.Client, draw: random.Random) -> str:
        """A long answer, left after a few chunks."""
        body = _chat(draw.choice(TOPICS)) | {"stream": True, "max_tokens": 400, "n": 2}
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                return _status(response, {200})
            for count, _ in enumerate(response.iter_lines()):
                if count >= draw.choice([0, 1, 9]):
                    break
        return "left"

    def schema(self, http: httpx.Client, draw: random.Random) -> str:
        """A document, or its beginning where the limit cut it off."""
        body = _chat(draw.choice(TOPICS)) | {"response_format": FORMAT, "max_tokens": 120}
        response = http.post("/v1/chat/completions", json=body)
        if (status := _status(response, {200})) != "200":
            return status
        if response.json()["choices"][0]["finish_reason"] == "length":
            return "cut off"
        if set(json.loads(_text(response))) != {"word", "sure"}:
            raise Violation(f"not a document: {_text(response)!r}")
        return "valid"

    def logprobs(self, http: httpx.Client, draw: random.Random) -> str:
        """As many entries as tokens."""
        body = _chat(draw.choice(TOPICS)) | {"logprobs": True, "top_logprobs": 3, "max_tokens": 16}
        response = http.post("/v1/chat/completions", json=body)
        if (status := _status(response, {200})) != "200":
            return status
        answer = response.json()
        entries = answer["choices"][0]["logprobs"]["content"]
        if len(entries) != answer["usage"]["completion_tokens"]:
            raise Violation(f"{len(entries)} entries: {answer}")
        return "counted"

    def wrong(self, http: httpx.Client, draw: random.Random) -> str:
        """Bodies that are refused, each with its reason."""
        more = draw.choice(
            [
                {"temperature": -1},
                {"frobnicate": 1},
                {"messages": [{"role": "user", "content": "x " * 60_000}]},
                {"response_format": {"type": "json_schema"}},
            ]
        )
        response = http.post("/v1/chat/completions", json=_chat("nothing") | more)
        _status(response, {400})
        return "refused"


def _chat(topic: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Write about {topic}."}]}


def _status(response: httpx.Response, allowed: set[int]) -> str:
    if response.status_code == 503 and "retry-after" in response.headers:
        time.sleep(0.05)
        return "queue full"
    if response.status_code not in allowed:
        raise Violation(f"{response.status_code}: {response.text[:300]}")
    return str(response.status_code)


def _text(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


def _streamed(events: str) -> str:
    if not events.endswith("data: [DONE]\n\n"):
        raise Violation(f"a stream broke off: {events[-300:]!r}")
    chunks = [json.loads(event[6:]) for event in events.split("\n\n")[:-2]]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _check_idle(url: str) -> dict[str, Any]:
    """The server's facts once nothing runs."""
    end = time.monotonic() + 120
    while True:
        info = httpx.get(f"{url}/server_info").json()
        if info["requests"] == {"running": 0, "waiting": 0}:
            break
        if time.monotonic() > end:
            raise Violation(f"never idle: {info['requests']}")
        time.sleep(0.2)
    if info["kv_pages"]["free"] != info["kv_pages"]["total"]:
        raise Violation(f"pages are held: {info['kv_pages']}")
    return info


def soak(process: subprocess.Popen[str], url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the traffic; the figures. Raises Violation."""
    run = Soak(url)
    start = time.monotonic()
    end = start + args.minutes * 60
    clients = [
        threading.Thread(target=run.client, args=(seed, end)) for seed in range(args.clients)
    ]
    for client in clients:
        client.start()
    memory = []
    while any(client.is_alive() for client in clients):
        memory.append(_resident_mib(process.pid))
        time.sleep(min(10.0, args.minutes * 2))
    if run.problems:
        raise Violation(run.problems[0])
    stats = _check_idle(url)["stats"]
    # The first half fills caches; the second must not keep growing.
    half, last = memory[len(memory) // 2], memory[-1]
    if last > half * 1.1 + 50:
        raise Violation(f"memory grew from {half:.0f} to {last:.0f} MiB in the second half")
    process.send_signal(signal.SIGTERM)
    if process.wait(60) != 0:
        raise Violation(f"exit status {process.returncode}")
    return {
        "minutes": (time.monotonic() - start) / 60,
        "requests": dict(sorted(run.counts.items())),
        "resident_mib": {"half_way": round(half), "end": round(last)},
        "stats": stats,
    }


def main() -> int:
    """Parse, start the server, soak it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--out", type=Path, help="where to write the figures")
    args = parser.parse_args()
    command = [str(Path(sys.executable).with_name("eagle3-serve")), "serve", args.target]
    command += ["--port", "0", "--json", "--max-batch-size", "6", "--max-queue", str(QUEUE)]
    command += ["--draft", args.draft] if args.draft else []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # for the server to be ended too
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        figures = soak(process, url, args)
    except Violation as violation:
        print(f"violated: {violation}", file=sys.stderr)
        return 1
    finally:
        process.kill()
        process.wait()
    text = json.dumps(figures, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
