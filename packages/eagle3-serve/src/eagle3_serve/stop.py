"""Where an output ends, decided token by token, and which of its text may be shown already.

A speculative round commits several tokens at once. Replaying them here one by one makes text, token
ids, usage and finish reason the same as without speculation (vllm PR 47616, sglang PR 33758).
"""

import codecs
from collections.abc import Collection
from typing import Literal

from transformers import PreTrainedTokenizerBase

from eagle3_serve.constraints import Constraint
from eagle3_serve.detokenize import token_bytes
from eagle3_serve.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "timeout"]


class OutputStream:
    """One request's output: ids, text, and the reason it ended.

    The token that ends the output is kept in `token_ids`. It adds no text if it is an
    end-of-sequence or stop id; a stop string is cut from the text whole. A stop beats the length
    limit when both fall on one token. Text of the first `min_tokens` tokens is no part of a stop
    string. Bytes that never became a character are dropped at the end.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        constraint: Constraint | None = None,
    ) -> None:
        """Start an empty output; `params.max_tokens` of None means no limit.

        It is done when `constraint` is complete, too, and moves that on.
        """
        self._constraint = constraint
        self.token_ids: list[int] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self._bytes = token_bytes(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._max_tokens = params.max_tokens
        self._min_tokens = params.min_tokens
        self._end_ids = params.end_ids(eos_token_ids)
        self._stops = params.stop
        self._held = ""  # may turn out to begin a stop string
        self._shown: list[str] = []
        self._taken = 0

    @property
    def text(self) -> str:
        """All text that is safe to show so far; the whole text once finished."""
        return "".join(self._shown)

    def push(self, token_id: int) -> Literal["stop", "length"] | None:
        """Add a token; returns why the output ended with it, or None.

        Must not be called again after a reason was returned.
        """
        assert self.finish_reason is None, "the output has ended"
        self.token_ids.append(token_id)
        if token_id in self._end_ids:
            self._end("stop")
        elif self._add_text(self._utf8.decode(self._bytes[token_id])):
            self.finish_reason = "stop"
        elif self._constraint is not None and self._completes(self._constraint, token_id):
            self._end("stop")
        elif self._max_tokens is not None and len(self.token_ids) >= self._max_tokens:
            self._end("length")
        return self.finish_reason

    def take_text(self) -> str:
        """Text that became safe to show since the last call."""
        new = "".join(self._shown[self._taken :])
        self._taken = len(self._shown)
        return new

    def finish(self) -> None:
        """Release held-back text of an output that ends from outside (an abort)."""
        self._show(self._held)
        self._held = ""

    def _completes(self, constraint: Constraint, token_id: int) -> bool:
        constraint.advance(token_id)
        return constraint.is_complete

    def _end(self, reason: Literal["stop", "length"]) -> None:
        self.finish_reason = reason
        self.finish()

    def _add_text(self, text: str) -> bool:
        """Append text; True if a stop string is now complete, which cuts the text before it."""
        held = self._held + text
        stops = self._stops if len(self.token_ids) > self._min_tokens else ()
        stop = _first_stop(held, stops)
        if stop is not None:
            self._show(held[:stop])
            self._held = ""
            return True
        keep = _open_stop(held, stops)
        self._show(held[: len(held) - keep])
        self._held = held[len(held) - keep :]
        return False

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)


def _first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Start of the stop string that is complete first, the longest of those that end together.

    This is what reading one character at a time gives, so the split into tokens plays no part.
    """
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _open_stop(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    for length in range(longest, 0, -1):
        if text.endswith(tuple(stop[:length] for stop in stops if len(stop) > length)):
            return length
    return 0
