"""The target answers many prompts at once: a continuous batch, a freed slot is refilled.

Requests share one preallocated cache, one row each. An answer depends on its own prompt and seed;
the batch around it changes it by rounding only.
"""

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3_core import UserError
from eagle3_core.target import Target, decoder_parts


@dataclass(frozen=True)
class Request:
    """A prompt to answer."""

    index: int  # of the caller's choice; the answer carries it
    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What the target wrote, without the token that ended it."""

    index: int
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"


@torch.inference_mode()
def generate(target: Target, requests: Sequence[Request], batch_size: int) -> Iterator[Answer]:
    """Answers as they finish, in no particular order.

    Args:
        target: its eos_token_ids end an answer.
        requests: any number.
        batch_size: how many are answered at a time.

    Raises:
        UserError: a layer needs another kind of cache, or is windowed below the longest request.
    """
    if not requests:
        return
    # Longest first: requests of similar length are in flight together, no long one comes last.
    queue = deque(sorted(requests, key=lambda r: -(len(r.prompt_ids) + r.max_tokens)))
    capacity = len(queue[0].prompt_ids) + queue[0].max_tokens
    _check_layers(target, capacity)
    slots = _Slots(target, min(batch_size, len(queue)), capacity)
    refill_at = max(1, slots.num_slots // 8)  # one prefill for several is cheaper than one each
    while queue or slots.running:
        free = slots.num_slots - len(slots.running)
        if queue and (free >= refill_at or free >= len(queue)):
            slots.admit([queue.popleft() for _ in range(min(free, len(queue)))])
        else:
            slots.step()
        yield from slots.take_finished()


@dataclass
class _Running:
    request: Request
    uniforms: Tensor | None  # [max_tokens] float64: one draw a token
    token_ids: list[int] = field(default_factory=list)


class _Slots:
    """The requests in flight fill the first rows of the batch; row i belongs to running[i]."""

    def __init__(self, target: Target, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.running: list[_Running] = []
        self._base: Any = decoder_parts(target.model).base
        self._head: Any = target.model.get_output_embeddings()
        self._eos = frozenset(target.eos_token_ids)
        self._device, self._dtype = self._head.weight.device, self._head.weight.dtype
        self._cache = _SlotCache(num_slots, capacity)
        # transformers renamed the argument; the old name is to go.
        parameters = inspect.signature(self._base.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._lengths = torch.zeros(num_slots, dtype=torch.int64, device=self._device)  # cached
        self._last = torch.zeros_like(self._lengths)  # the token to be cached next

    def admit(self, requests: Sequence[Request]) -> None:
        """Read the prompts and write each answer's first token."""
        first = len(self.running)
        lengths = torch.tensor([len(r.prompt_ids) for r in requests], device=self._device)
        longest = int(lengths.max())
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)
        for row, request in enumerate(requests):
            ids[row, : lengths[row]] = torch.tensor(request.prompt_ids)
        rows = torch.arange(first, first + len(requests), device=self._device)
        positions = torch.arange(longest, device=self._device).expand(len(requests), -1)
        # Padding stands to the right, where causality hides it.
        visible = positions[:1, None, :] <= positions[:1, :, None]
        self._cache.write_to(rows, positions, visible=0)
        states = self._forward(ids.to(self._device), positions, visible[:, None])
        self.running += [_Running(r, _uniforms(r)) for r in requests]
        self._lengths[rows] = lengths
        self._append(first, states[torch.arange(len(requests)), lengths - 1])

    def step(self) -> None:
        """Write one more token of each answer."""
        n = len(self.running)
        positions = self._lengths[:n, None]
        span = int(positions.max()) + 1
        visible = torch.arange(span, device=self._device) <= positions
        self._cache.write_to(torch.arange(n, device=self._device), positions, visible=span)
        states = self._forward(self._last[:n, None], positions, visible[:, None, None])
        self._lengths[:n] += 1
        self._append(0, states[:, 0])

    def take_finished(self) -> Iterator[Answer]:
        """Remove the finished answers; the last row moves into the gap."""
        for row in range(len(self.running) - 1, -1, -1):
            answer = self._answer(self.running[row])
            if answer is None:
                continue
            last = len(self.running) - 1
            if row < last:
                self._cache.copy_row(last, row)
                self._lengths[row], self._last[row] = self._lengths[last], self._last[last]
                self.running[row] = self.running[last]
            self.running.pop()
            yield answer

    def _forward(self, ids: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """[b,q] -> [b,q,T] after the final norm; `visible` is [b or 1,1,q,keys] bool."""
        # Four dimensions are taken as they are; additive, since eager attention knows no bool mask.
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(~visible, torch.finfo(self._dtype).min)
        cache = {self._cache_argument: self._cache, "use_cache": True}
        return self._base(
            input_ids=ids, attention_mask=mask, position_ids=positions, **cache
        ).last_hidden_state

    def _append(self, first: int, states: Tensor) -> None:
        """Choose the next token of running[first:] from their states [b,T]."""
        logits = self._head(states)
        tokens = logits.argmax(-1)
        for i, running in enumerate(self.running[first:]):
            if running.uniforms is not None:
                uniform = running.uniforms[len(running.token_ids)]
                tokens[i] = sample(
                    logits[i], running.request.temperature, running.request.top_p, float(uniform)
                )
        self._last[first : len(self.running)] = tokens
        for running, token in zip(self.running[first:], tokens.tolist(), strict=True):
            running.token_ids.append(token)

    def _answer(self, running: _Running) -> Answer | None:
        ids = running.token_ids
        if ids[-1] in self._eos:
            return Answer(running.request.index, ids[:-1], "stop")
        if len(ids) == running.request.max_tokens:
            return Answer(running.request.index, ids, "length")
        return None


class _SlotCache:
    """The model's attention layers take it for their cache: [slots,heads,capacity,dim] each."""

    is_compileable = False  # asked by transformers when it builds masks

    def __init__(self, num_slots: int, capacity: int) -> None:
        self._shape = num_slots, capacity
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def write_to(self, rows: Tensor, positions: Tensor, visible: int) -> None:
        """Say where the next forward's keys go (rows [b], positions [b,q]) and how many it sees.

        With `visible=0` it sees its own only: a prompt from its beginning.
        """
        self._rows, self._positions, self._visible = rows, positions, visible

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer; [b,heads,q,dim] in, what it attends to out."""
        if layer_idx not in self._buffers:
            slots, capacity = self._shape
            self._buffers[layer_idx] = (
                keys.new_zeros(slots, keys.shape[1], capacity, keys.shape[3]),
                values.new_zeros(slots, values.shape[1], capacity, values.shape[3]),
            )
        held = self._buffers[layer_idx]
        for buffer, new in zip(held, (keys, values), strict=True):
            buffer[self._rows[:, None], :, self._positions] = new.transpose(1, 2)
        if not self._visible:
            return keys, values
        n = len(self._rows)
        return held[0][:n, :, : self._visible], held[1][:n, :, : self._visible]

    def copy_row(self, source: int, destination: int) -> None:
        """Move a request to another row."""
        for held in self._buffers.values():
            for buffer in held:
                buffer[destination].copy_(buffer[source])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked by models that derive positions from it; ours are always given."""
        return 0


def sample(logits: Tensor, temperature: float, top_p: float, uniform: float) -> int:
    """Draw a token by inverting the distribution function at `uniform` in [0,1).

    Args:
        logits: [V].
        temperature: > 0.
        top_p: keep the most likely tokens until their mass reaches it.
        uniform: the only randomness.
    """
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    order = torch.arange(len(logits), device=logits.device)
    if top_p < 1:
        probabilities, order = probabilities.sort(descending=True, stable=True)
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    mass = probabilities.cumsum(0)
    # right=True passes over tokens of mass zero; rounding must not lead past the last possible one.
    drawn = int(torch.searchsorted(mass, mass[-1] * uniform, right=True))
    return int(order[min(drawn, int(probabilities.nonzero()[-1]))])


def _uniforms(request: Request) -> Tensor | None:
    if request.temperature == 0:
        return None
    generator = torch.Generator().manual_seed(request.seed)
    return torch.rand(request.max_tokens, generator=generator, dtype=torch.float64)


def _check_layers(target: Target, longest: int) -> None:
    config = target.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise UserError(
            f"target {target.name}: its {unknown[0]} layers cannot answer prompts here; "
            "let an inference server write the answers and name that file in data.train"
        )
    window = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in kinds or not getattr(config, "layer_types", None)
    if window and windowed and getattr(config, "use_sliding_window", True) and longest > window:
        raise UserError(
            f"target {target.name}: a prompt and its answer take {longest} tokens, more than the "
            f"sliding window of {window}; lower regenerate.max_tokens or drop the longest prompts"
        )
