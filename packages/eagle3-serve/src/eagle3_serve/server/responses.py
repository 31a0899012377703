"""Response bodies and stream chunks of the two endpoints."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3_serve.engine import TokenOutput
from eagle3_serve.metrics import RequestStats
from eagle3_serve.server.tokens import TokenRecord, TokenTexts
from eagle3_serve.server.tools import CallReader
from eagle3_serve.verify import TokenLogprobs


@dataclass
class Piece:
    """What one choice gained: in a stream one chunk, in a whole answer all of it."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell a client."""
        return self == Piece()

    def add(self, later: "Piece") -> None:
        """Append what came later."""
        self.text += later.text
        self.logprobs += later.logprobs
        self.rounds += later.rounds
        self.tool_calls += later.tool_calls
        self.finish_reason = later.finish_reason


class Choice:
    """Turns one output of the engine into pieces of an answer."""

    def __init__(self, index: int, texts: TokenTexts, reader: CallReader | None) -> None:
        """`reader` looks for tool calls; None if there can be none."""
        self.index = index
        self.record = TokenRecord(texts)
        self._reader = reader

    def read(self, output: TokenOutput) -> Piece:
        """What an output adds."""
        piece = Piece(output.text, list(output.logprobs or ()), finish_reason=output.finish_reason)
        if output.trace is not None:
            piece.rounds.append(self.record.round(output.trace, output.token_ids))
        if self._reader is not None:
            piece.text = self._reader.push(output.text)
            if output.finish_reason is not None:
                rest, piece.tool_calls = self._reader.finish()
                piece.text += rest
                if piece.tool_calls and output.finish_reason == "stop":
                    piece.finish_reason = "tool_calls"
        return piece


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

    def counts(self) -> dict[str, Any]:
        """Tokens so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def body(self) -> dict[str, Any]:
        """The `usage` object; `speculation` is this server's extension."""
        total = RequestStats()
        for stats in self._ended:
            total.add(stats)
        return {
            **self.counts(),
            # A prompt counts once, whatever its choices: so does what was found of it.
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens // self.num_choices},
            "speculation": {
                "accept_length": total.accept_length,
                "num_rounds": total.num_rounds,
                "num_drafted_tokens": total.num_drafted_tokens,
                "num_accepted_tokens": total.num_accepted_tokens,
                "num_accepted_per_position": total.num_accepted_per_position,
            },
        }


class ResponseFormat(ABC):
    """One response: every body and chunk carries the same id, time and model."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        *,
        has_logprobs: bool = False,
        new_reader: Callable[[], CallReader] | None = None,
        echoes: Sequence[str] = (),
    ) -> None:
        """A fresh id, the present time.

        Args:
            model: its name.
            texts: of single tokens.
            has_logprobs: whether they were asked for.
            new_reader: looks for tool calls in a choice's text.
            echoes: what each choice's text begins with.
        """
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._texts, self._has_logprobs = texts, has_logprobs
        self._new_reader, self._echoes = new_reader, echoes

    def choice(self, index: int) -> Choice:
        """The reader of a choice's outputs."""
        return Choice(index, self._texts, self._new_reader() if self._new_reader else None)

    def whole(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [self._choice(c, piece, self._whole(c, piece)) for c, piece in choices],
            "usage": usage.body(),
        }

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """What a choice's stream begins with, if anything."""
        return None

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """New content of a choice; its last chunk is the only one with a finish reason."""
        return self._chunk(self._choice(choice, piece, self._delta(piece)))

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk after all choices, when usage was asked for."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage.body()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    def _choice(self, choice: Choice, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        wanted = self._has_logprobs and (piece.logprobs or piece.finish_reason is None)
        body = {
            "index": choice.index,
            **content,
            "logprobs": self._logprobs(choice, piece.logprobs) if wanted else None,
            "finish_reason": piece.finish_reason,
        }
        return body | {"rounds": piece.rounds} if piece.rounds else body

    @abstractmethod
    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The whole content of a choice, where the endpoint has it."""

    @abstractmethod
    def _delta(self, piece: Piece) -> dict[str, Any]:
        """New content of a choice, where the endpoint has it."""

    @abstractmethod
    def _logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Logprobs as the endpoint has them."""


class ChatFormat(ResponseFormat):
    """`/v1/chat/completions`: the role comes in the first delta of each choice, and only there."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> dict[str, Any]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        return self._chunk(
            {"index": choice.index, **delta, "logprobs": None, "finish_reason": None}
        )

    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.tool_calls:
            message |= {"content": piece.text or None, "tool_calls": piece.tool_calls}
        return {"message": message}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.tool_calls:
            calls = enumerate(piece.tool_calls)
            delta["tool_calls"] = [{"index": i, **call} for i, call in calls]
        return {"delta": delta}

    def _logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return choice.record.chat(entries)


class CompletionFormat(ResponseFormat):
    """`/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if not self._echoes:
            return None
        echo = {"text": self._echoes[choice.index]}
        return self._chunk({"index": choice.index, **echo, "logprobs": None, "finish_reason": None})

    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {"text": (self._echoes[choice.index] if self._echoes else "") + piece.text}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def _logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return choice.record.completion(entries)
