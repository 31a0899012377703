"""Sampling parameters, and the choice of a token from logits by one coin.

Everything random about a request is a function of (seed, absolute position): position i of a
request has one coin in [0, 1), and the token there is the inverse of the target's cumulative
distribution at that coin. Speculation only guesses this token ahead of time, so the text of a seed
does not depend on the draft, on K, or on who shares the batch.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_core import UserError
from eagle3_core.accept import inverse_cdf
from eagle3_core.tree import top


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    The order of application is transformers': what `processors` does (logit_bias, penalties,
    min_tokens), then temperature, top_k, top_p, min_p.

    Raises:
        UserError: a value is out of range.
    """

    max_tokens: int | None = None  # None = what fits in the context
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 or -1 = off
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, as a share of the most likely token's
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what its logit gains)
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    seed: int | None = None  # None = a fresh one for every request
    stop: tuple[str, ...] = ()  # cut from the text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # before any end token or stop string
    grammar: str | None = None  # that the output has to match, from `constraints`
    logprobs: int | None = None  # with each token its logprob and those of so many alternatives
    trace: bool = False  # say of each round what was drafted and what was kept

    def __post_init__(self) -> None:
        """Check every range."""
        limit = self.max_tokens
        _require("max_tokens", limit is None or limit >= 1, limit, "a whole number >= 1")
        valid = math.isfinite(self.temperature) and self.temperature >= 0
        _require("temperature", valid, self.temperature, "a finite number >= 0")
        _require("top_k", self.top_k >= -1, self.top_k, "a whole number >= 1, or 0 for off")
        _require("top_p", 0 < self.top_p <= 1, self.top_p, "a number above 0 and up to 1")
        _require("min_p", 0 <= self.min_p <= 1, self.min_p, "a number from 0 to 1")
        for _, value in self.logit_bias:
            _require("logit_bias", math.isfinite(value), value, "finite numbers")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(name, math.isfinite(value), value, "a finite number")
        penalty = self.repetition_penalty
        valid = math.isfinite(penalty) and penalty > 0
        _require("repetition_penalty", valid, penalty, "a finite number above 0")
        _require("min_tokens", self.min_tokens >= 0, self.min_tokens, "a whole number >= 0")
        if limit is not None:
            expected = f"at most max_tokens, {limit}"
            _require("min_tokens", self.min_tokens <= limit, self.min_tokens, expected)
        if self.grammar is not None:
            # A grammar that is complete leaves nothing but to end.
            _require("min_tokens", not self.min_tokens, self.min_tokens, "0 with a grammar")
            _require("ignore_eos", not self.ignore_eos, self.ignore_eos, "false with a grammar")
        alternatives = self.logprobs
        _require("logprobs", alternatives is None or alternatives >= 0, alternatives, "at least 0")
        _require("stop", all(self.stop), list(self.stop), "texts of at least one character")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, no coin needed."""
        return self.temperature == 0 or self.top_k == 1

    def end_ids(self, eos_token_ids: Collection[int]) -> set[int]:
        """The tokens that end the output, of a target with these end-of-sequence tokens."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that have been used before are judged differently."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)


def _require(name: str, holds: bool, found: object, expected: str) -> None:
    if not holds:
        raise UserError(f"{name} is {found!r}, expected {expected}")


def coin(seed: int, position: int, purpose: str = "") -> float:
    """The coin in [0, 1) of one position; independent of everything but its arguments."""
    digest = hashlib.blake2b(f"{seed} {position}{purpose}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53


def processed_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """[..., V] logits -> the float64 distribution that is sampled from, after all parameters.

    Of logits that `processors` has seen to: temperature, top_k, top_p, min_p. top_p keeps the
    smallest set of most likely tokens whose mass reaches it, at least one.
    """
    # Maximum first and in float64: no temperature above 0 gives inf or NaN.
    logits = logits.double()
    probs = ((logits - logits.amax(-1, keepdim=True)) / params.temperature).softmax(-1)
    if 0 < params.top_k < probs.shape[-1]:
        kept = top(logits, params.top_k)[1]  # of equal ones the lower ids
        probs = torch.zeros_like(probs).scatter(-1, kept, probs.gather(-1, kept))
        probs = probs / probs.sum(-1, keepdim=True)
    if params.top_p < 1:
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.masked_fill(before >= params.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ranked)
        probs = probs / probs.sum(-1, keepdim=True)
    if params.min_p > 0:
        least = params.min_p * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def choose(logits: Tensor, params: SamplingParams, coins: Sequence[float]) -> Tensor:
    """The token of each row: [R,V] logits and R coins (unused when greedy) -> [R] ids."""
    if params.is_greedy:
        return logits.argmax(-1)
    probs = processed_probs(logits, params)
    return inverse_cdf(probs, torch.tensor(coins, dtype=torch.float64, device=probs.device))
