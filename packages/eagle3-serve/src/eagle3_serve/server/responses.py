"""Response bodies and stream chunks of the two endpoints."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3_serve.engine import TokenOutput
from eagle3_serve.metrics import RequestStats


@dataclass
class Choice:
    """What one choice has come to so far."""

    index: int
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class Usage:
    """Token counts of a response, and how speculation fared over all its choices."""

    prompt_tokens: int
    num_choices: int = 1  # of every prompt
    completion_tokens: int = 0
    _cached_tokens: int = 0
    _ended: list[RequestStats] = field(default_factory=list)

    def add(self, output: TokenOutput) -> None:
        """Count one output of the engine."""
        self.completion_tokens += len(output.token_ids)
        if output.finish_reason is not None:  # only then has the engine stopped counting
            self._ended.append(output.stats)
            self._cached_tokens += output.num_cached_tokens

    def body(self) -> dict[str, Any]:
        """The `usage` object; `speculation` is this server's extension."""
        rounds = sum(stats.num_rounds for stats in self._ended)
        emitted = sum(stats.num_round_tokens for stats in self._ended)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            # A prompt counts once, whatever its choices: so does what was found of it.
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens // self.num_choices},
            "speculation": {
                "accept_length": emitted / rounds if rounds else 1.0,
                "num_rounds": rounds,
                "num_drafted_tokens": sum(stats.num_drafted_tokens for stats in self._ended),
                "num_accepted_tokens": sum(stats.num_accepted_tokens for stats in self._ended),
            },
        }


class ResponseFormat(ABC):
    """One response: every body and chunk carries the same id, time and model."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str) -> None:
        """A fresh id, the present time."""
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [
                {
                    "index": choice.index,
                    **self._text(choice.text),
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            "usage": usage.body(),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream begins with, if anything."""
        return None

    def delta(self, index: int, text: str) -> dict[str, Any]:
        """New text of a choice."""
        return self._chunk(index, self._delta(text), None)

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The last chunk of a choice, the only one with a finish reason."""
        return self._chunk(index, self._delta(""), finish_reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk after all choices, when usage was asked for."""
        return {
            **self._head,
            "object": self.chunk_object,
            "choices": [],
            "usage": usage.body(),
        }

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, **delta, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    @abstractmethod
    def _text(self, text: str) -> dict[str, Any]:
        """The whole text of a choice, where the endpoint has it."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """New text of a choice, where the endpoint has it."""


class ChatFormat(ResponseFormat):
    """`/v1/chat/completions`: the role comes in the first delta of each choice, and only there."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


class CompletionFormat(ResponseFormat):
    """`/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}
