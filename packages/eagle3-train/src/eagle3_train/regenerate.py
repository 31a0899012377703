"""The target answers prompts itself, so that the draft learns what the target says.

The output is append-only JSON lines. A row of the input is recognised by what it is (id, turns,
tools), never by where it stands, so a restart continues whatever became of the input meanwhile.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3_core import UserError
from eagle3_core.target import Target
from eagle3_train.data.drops import Drops, Unusable
from eagle3_train.data.read import Conversation, Message, read_conversations, to_conversation
from eagle3_train.data.template import ChatTemplate
from eagle3_train.display import display
from eagle3_train.generate import Answer, Request, generate


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; written into every output row."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Regenerated:
    """Account of one run."""

    num_resumed: int = 0
    num_answered: int = 0
    num_cut: int = 0  # ended by max_tokens
    num_failed: int = 0
    num_tokens: int = 0  # written by the target in this run
    seconds: float = 0.0
    drops: Drops = field(default_factory=Drops)

    @property
    def tokens_per_s(self) -> float:
        """Speed of this run; 0 if it had nothing to do."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class _Job:
    row: Conversation
    prompt: tuple[Message, ...]
    sample: int
    seed: int


def regenerate(
    target: Target,
    template: ChatTemplate,
    sources: Sequence[str],
    output: Path,
    sampling: Sampling,
    *,
    samples_per_prompt: int = 1,
    greedy_first: bool = False,
    batch_size: int = 32,
    strict: bool = False,
    progress: bool = True,
) -> Regenerated:
    """Answer the last question of every row, and append the conversations to `output`.

    A row of the output is `messages` with the answer, `finish_reason` ("stop", "length": cut by
    max_tokens, "error": not answered), and the input's `id` and `tools`.

    Args:
        target: writes the answers.
        template: of the target.
        sources: see `read_conversations`; answers they already hold are replaced.
        output: continued if it exists.
        sampling: the same for the whole file.
        samples_per_prompt: answers to each row, drawn with seeds of their own.
        greedy_first: the first answer to each row is greedy whatever the temperature.
        batch_size: prompts answered at a time.
        strict: an unusable row ends the run.
        progress: show it.

    Raises:
        UserError: nothing to answer, or `output` holds answers drawn in another way.
    """
    if samples_per_prompt > 1 and sampling.temperature == 0:
        raise UserError(
            f"regenerate.samples_per_prompt is {samples_per_prompt} at temperature 0, where all "
            "answers are the same; raise regenerate.temperature or ask for one"
        )
    result = Regenerated(drops=Drops(strict))
    jobs = _jobs(sources, samples_per_prompt, sampling.seed, result.drops)
    settings = _settings(target, sampling)
    done = _recover(output, settings)
    pending = _subtract(jobs, done)
    result.num_resumed = len(jobs) - len(pending)
    requests, failed = [], []
    for index, job in enumerate(pending):
        try:
            requests.append(_request(index, job, target, template, sampling, greedy_first))
        except Unusable as reason:
            result.drops.add(job.row.where, str(reason))
            failed.append(_output_row(job, settings, None, "error", str(reason)))
    result.num_failed = len(failed)
    if not requests and not result.num_resumed:
        raise UserError(_nothing(sources, result.drops))
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        for row in failed:
            _write(file, row)
        started = time.perf_counter()
        with display("regenerate", len(requests), progress) as bar:
            for answer in generate(target, requests, batch_size):
                result.num_answered += 1
                result.num_cut += answer.finish_reason == "length"
                result.num_tokens += len(answer.token_ids)
                result.seconds = time.perf_counter() - started
                text = _answer_text(template, answer)
                row = _output_row(pending[answer.index], settings, text, answer.finish_reason)
                _write(file, row)
                bar.update(result.num_answered, f"{result.tokens_per_s:.0f} tokens/s")
        os.fsync(file.fileno())
    return result


def _jobs(sources: Sequence[str], samples_per_prompt: int, seed: int, drops: Drops) -> list[_Job]:
    rows = read_conversations(sources, drops).conversations
    if not rows:
        raise UserError(_nothing(sources, drops))
    jobs = []
    for row in rows:
        prompt = row.messages
        while prompt and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
        if not any(message["role"] == "user" for message in prompt):
            drops.add(row.where, "no user turn to answer")
            continue
        for sample in range(samples_per_prompt):
            key = _key(row.id, prompt, row.tools, sample)
            digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
            jobs.append(_Job(row, prompt, sample, int.from_bytes(digest[:8]) >> 1))
    return jobs


def _nothing(sources: Sequence[str], drops: Drops) -> str:
    found = "; ".join(drops.summary()) or "no rows"
    return f"{', '.join(sources)}: nothing to answer: {found}"


def _key(row_id: Any, prompt: Sequence[Message], tools: Sequence[Any], sample: int) -> str:
    return json.dumps([row_id, list(prompt), list(tools), sample], sort_keys=True)


def _subtract(jobs: Sequence[_Job], done: Counter[str]) -> list[_Job]:
    """The jobs without a result. Equal rows need as many results as there are of them."""
    left = done.copy()
    pending = []
    for job in jobs:
        key = _key(job.row.id, job.prompt, job.row.tools, job.sample)
        if left[key] > 0:
            left[key] -= 1
        else:
            pending.append(job)
    return pending


def _request(
    index: int,
    job: _Job,
    target: Target,
    template: ChatTemplate,
    sampling: Sampling,
    greedy_first: bool,
) -> Request:
    text = template.render(job.prompt, tools=job.row.tools, open_answer=True)
    ids = template.encode(text).ids
    limit = target.max_position_embeddings
    if len(ids) + sampling.max_tokens > limit:
        raise Unusable(
            f"a prompt of {len(ids)} tokens and an answer of up to {sampling.max_tokens} "
            f"exceed the target's {limit}"
        )
    greedy = greedy_first and job.sample == 0
    temperature = 0.0 if greedy else sampling.temperature
    return Request(index, ids, sampling.max_tokens, temperature, sampling.top_p, job.seed)


def _answer_text(template: ChatTemplate, answer: Answer) -> str:
    text = template.decode(answer.token_ids, skip_special_tokens=True)
    # A cut answer may end within a character.
    return text.rstrip("\ufffd") if answer.finish_reason == "length" else text


def _settings(target: Target, sampling: Sampling) -> dict[str, Any]:
    return {"target": target.name, "dtype": str(target.model.dtype), **asdict(sampling)}


def _output_row(
    job: _Job,
    settings: dict[str, Any],
    answer: str | None,
    finish_reason: str,
    error: str | None = None,
) -> dict[str, Any]:
    messages = list(job.prompt)
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    row: dict[str, Any] = {"messages": messages, "finish_reason": finish_reason}
    if job.row.id is not None:
        row = {"id": job.row.id, **row}
    if job.row.tools:
        row["tools"] = list(job.row.tools)
    if error is not None:
        row["error"] = error
    return {**row, "sample": job.sample, "settings": settings}


def _write(file: Any, row: dict[str, Any]) -> None:
    """One line in one write, so that a kill tears at most the last line."""
    file.write(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")
    file.flush()


def _recover(output: Path, settings: dict[str, Any]) -> Counter[str]:
    """How many results of each job `output` holds, after its torn last line, if any, is cut off.

    Raises:
        UserError: names the line that is no result, or was drawn with other settings.
    """
    if not output.exists():
        return Counter()
    data = output.read_bytes()
    complete = data.rfind(b"\n") + 1
    done = Counter(
        _key_of_result(f"{output}:{number}", line, settings)
        for number, line in enumerate(data[:complete].split(b"\n"), 1)
        if line.strip()
    )
    if complete < len(data):
        os.truncate(output, complete)
    return done


def _key_of_result(where: str, line: bytes, settings: dict[str, Any]) -> str:
    try:
        row = json.loads(line)
        failed = row.get("finish_reason") == "error"
        conversation = to_conversation(where, {**row, "finish_reason": None})
    except (ValueError, AttributeError, Unusable):
        raise UserError(
            f"{where}: is not a regenerated conversation; give the run another output folder"
        ) from None
    for name, found in (row.get("settings") or settings).items():
        if found != settings.get(name):
            raise UserError(
                f"{where}: was written with {name} {found!r}, now it is {settings.get(name)!r}; "
                "delete this file, or give the run another output folder"
            )
    messages = conversation.messages
    prompt = messages if failed else messages[:-1]
    return _key(conversation.id, prompt, conversation.tools, row.get("sample", 0))
