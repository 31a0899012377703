"""Requests: who waits, who runs, and the slots they own."""

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3_core import UserError
from eagle3_serve.kv import SlotAllocator
from eagle3_serve.metrics import RequestStats
from eagle3_serve.processors import LogitsProcessor
from eagle3_serve.sampling import SamplingParams, coin
from eagle3_serve.stop import OutputStream


@dataclass(eq=False)
class Request:
    """One sequence on its way.

    `tokens` is prompt and output. Target keys are held for the first `num_held` of them; in
    between rounds that is all but the last, or none before the prompt has run. Draft slot t pairs
    the target's states at t with token t+1, so the draft holds `num_held` slots too.
    """

    id: str
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    limit: int  # length at which the sequence ends at the latest
    stream: OutputStream
    processor: LogitsProcessor | None = None  # None: nothing changes logits before temperature
    slot: int = -1
    num_held: int = 0
    first_draft: int = -1  # what the draft proposes next; known once its slots are filled
    # [H], what the draft's next step takes in place of aux states
    feedback: Tensor = field(default_factory=lambda: torch.empty(0))
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - len(self.tokens)

    def coin(self, position: int) -> float:
        """The coin of a position; a greedy request has no use for one."""
        return 0.0 if self.params.is_greedy else coin(self.seed, position)


class Scheduler:
    """First come, first served; a request starts when its whole run of slots is free."""

    def __init__(
        self, max_batch_size: int, max_model_len: int, num_slots: int, spare: int = 0
    ) -> None:
        """`spare` is how far a round's rows may reach behind a request's limit (a wide tree)."""
        self._spare = spare
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._max_batch_size = max_batch_size
        self._max_model_len = max_model_len
        self._slots = SlotAllocator(num_slots)

    @property
    def num_free_slots(self) -> int:
        """Slots that no request owns."""
        return self._slots.num_free

    def limit(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Length at which a request ends at the latest.

        Raises:
            UserError: the prompt is empty or leaves no room for one token.
        """
        length, room = len(prompt_ids), self._max_model_len - len(prompt_ids)
        if not length:
            raise UserError("prompt: is empty, expected at least one token")
        if room < 1:
            raise UserError(
                f"prompt: is {length} tokens long, expected at most {self._max_model_len - 1}: the "
                f"context limit is {self._max_model_len} tokens, prompt and answer together"
            )
        return length + (room if params.max_tokens is None else min(room, params.max_tokens))

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Start waiting requests while there is room; returns all that run."""
        while self.waiting and len(self.running) < self._max_batch_size:
            slot = self._slots.allocate(self.waiting[0].limit + self._spare)
            if slot is None:
                break  # no overtaking: a long request must not starve
            request = self.waiting.popleft()
            request.slot = slot
            self.running.append(request)
        return list(self.running)

    def remove(self, request: Request) -> None:
        """Drop a request wherever it is, and free its slots."""
        if request.slot < 0:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._slots.free(request.slot, request.limit + self._spare)
            request.slot = -1


def fresh_seed() -> int:
    """A seed for a request without one."""
    return secrets.randbits(63)
