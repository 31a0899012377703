"""Requests: who waits, who runs, and what each does in a round."""

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3_core import UserError
from eagle3_serve.metrics import RequestStats
from eagle3_serve.pages import PagePool, PageTable
from eagle3_serve.processors import LogitsProcessor
from eagle3_serve.sampling import SamplingParams, coin
from eagle3_serve.stop import OutputStream


@dataclass(eq=False)
class Request:
    """One sequence on its way.

    `tokens` is prompt and output. Target keys are held for the first `num_held` of them; while it
    decodes, that is all but the last between rounds. Draft slot t pairs the target's states at t
    with token t+1, so the draft holds `num_held` slots too.
    """

    id: str
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    limit: int  # length at which the sequence ends at the latest
    stream: OutputStream
    table: PageTable
    processor: LogitsProcessor | None = None  # None: nothing changes logits before temperature
    failure: str | None = None  # why its last round came to nothing
    deadline: float = math.inf  # on the monotonic clock
    num_held: int = 0
    is_decoding: bool = False  # all tokens but the last are held, and the draft has a proposal
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache at the start
    # Known once the draft's slots are filled: [D], what it says about the next token, and [H], what
    # its next step takes in place of aux states.
    draft_logits: Tensor = field(default_factory=lambda: torch.empty(0))
    feedback: Tensor = field(default_factory=lambda: torch.empty(0))
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - len(self.tokens)

    @property
    def needs_draft(self) -> bool:
        """Whether a round follows that may emit more than one token."""
        return self.is_decoding and self.stream.finish_reason is None and self.num_left > 1

    def coin(self, position: int, purpose: str = "") -> float:
        """The coin of a position; a greedy request has no use for one."""
        return 0.0 if self.params.is_greedy else coin(self.seed, position, purpose)


class Turn(NamedTuple):
    """What a request does in a round: its next `num_tokens` known tokens run through the target."""

    request: Request
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the next token comes out of it; else it is a piece of a long prompt."""
        return self.request.num_held + self.num_tokens == len(self.request.tokens)


@dataclass(frozen=True)
class Limits:
    """What a scheduler has to share out."""

    batch_size: int  # requests that run
    num_batched_tokens: int  # rows of a round, as far as prompts are concerned
    model_len: int  # tokens of a sequence
    round_slots: int  # rows of a decoding request, and slots they take from its last token on


class Scheduler:
    """First come, first served.

    A request starts once there are pages for its known tokens and a round. When pages run out
    later, the request that came last gives all of its up, waits as the first in line, and runs
    through its tokens again: the oldest always goes on, so everything ends. Nobody overtakes.
    """

    def __init__(
        self, limits: Limits, pool: PagePool, copy_page: Callable[[int, int], None]
    ) -> None:
        """`copy_page` copies a page to another in all stores.

        `pool` holds a sequence of `limits.model_len` and its last round at least.
        """
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order they came
        self.num_preemptions = 0
        self._limits, self._pool, self._copy_page = limits, pool, copy_page

    def limit(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Length at which a request ends at the latest.

        Raises:
            UserError: the prompt is empty or leaves no room for one token.
        """
        longest = self._limits.model_len
        length, room = len(prompt_ids), longest - len(prompt_ids)
        if not length:
            raise UserError("prompt: is empty, expected at least one token")
        if room < 1:
            raise UserError(
                f"prompt: is {length} tokens long, expected at most {longest - 1}: the "
                f"context limit is {longest} tokens, prompt and answer together"
            )
        return length + (room if params.max_tokens is None else min(room, params.max_tokens))

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    @property
    def num_places(self) -> int:
        """Requests that may still start, as far as the batch is concerned."""
        return self._limits.batch_size - len(self.running)

    def plan(self) -> list[Turn]:
        """The turns of a round, with room in the pages for their rows."""
        num_preemptions = self.num_preemptions
        self._make_room()
        if self.num_preemptions == num_preemptions:
            self._admit()
        turns = []
        decoding = sum(r.is_decoding for r in self.running) * self._limits.round_slots
        # Decoding is never held up, and some prompt always goes on.
        left = max(self._limits.num_batched_tokens - decoding, 1)
        for request in self.running:
            missing = len(request.tokens) - request.num_held
            if not request.is_decoding:
                missing = min(missing, left)
                left -= missing
            if missing:
                turns.append(Turn(request, missing))
        return turns

    def remember(self, requests: Iterable[Request]) -> None:
        """Let others share pages whose slots, the target's and the draft's, are all written."""
        for request in requests:
            request.table.remember(request.tokens, request.num_held)

    def remove(self, request: Request) -> None:
        """Drop a request wherever it is, and free its pages."""
        (self.running if request in self.running else self.waiting).remove(request)
        request.table.release()

    def check_idle(self) -> None:
        """With no request left, no page is held.

        Raises:
            RuntimeError: pages have leaked.
        """
        leaked = self._pool.num_pages - self._pool.num_free
        if leaked and not self.running and not self.waiting:
            raise RuntimeError(f"{leaked} pages are held although there is no request")

    def _make_room(self) -> None:
        """Pages for the round of everybody who runs, taken from those who came last."""
        for request in list(self.running):
            while request in self.running and not request.table.reserve(self._reach(request)):
                self._preempt(self.running[-1])

    def _reach(self, request: Request) -> int:
        """Slots that a request may have written after its next round."""
        return len(request.tokens) - 1 + self._limits.round_slots

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.table.release()
        request.num_held, request.is_decoding = 0, False
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _admit(self) -> None:
        while self.waiting and self.num_places:
            request = self.waiting[0]
            reach = self._reach(request)
            if request.table.num_pages_to_take(request.tokens, reach) > self._pool.num_free:
                break  # no overtaking: a long request must not starve
            request.num_held = request.table.share_prefix(request.tokens, self._copy_page)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_held
            if not request.table.reserve(reach):
                raise RuntimeError("the pages that were counted as free are not")
            self.running.append(self.waiting.popleft())


def fresh_seed() -> int:
    """A seed for a request without one."""
    return secrets.randbits(63)
