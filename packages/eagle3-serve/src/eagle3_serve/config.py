"""What an engine is told once, at start."""

from dataclasses import dataclass
from typing import get_args

from eagle3_core import UserError
from eagle3_core.tree import TreeShape
from eagle3_serve.ops.select import Implementation

ACCEPTANCES = ("coupled", "block")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and shape of an engine.

    Raises:
        UserError: a value is out of range.
    """

    num_speculative_tokens: int = 3  # K, drafted per round or depth of a tree; 0 decodes plainly
    topk: int = 1  # children of a tree's node; 1 drafts chains
    num_verify_tokens: int | None = None  # N, rows of a tree with the root; None = 1 + K * topk
    acceptance: str = "coupled"  # or "block": how sampled requests accept drafts
    max_batch_size: int = 8  # requests in one round; the others wait
    max_model_len: int | None = None  # prompt and answer together; None = what the target can do
    kv_cache_gib: float = 4.0  # bound on the keys and values of target and draft together
    ops: Implementation = "auto"  # "triton" or "reference"; auto is triton on a GPU
    exact: bool = False  # the same bits for a row whatever runs beside it, in bf16 too
    page_size: int = 16  # tokens; the unit in which memory is given out and prefixes are shared
    max_num_batched_tokens: int = 512  # of a round; what decoding leaves of it goes to prompts
    max_queue_size: int | None = None  # requests that may wait; None = any number
    request_timeout_s: float | None = None  # from its arrival on; None = never

    def __post_init__(self) -> None:
        """Check every range."""
        _require("num_speculative_tokens", self.num_speculative_tokens, 0)
        _require("topk", self.topk, 1)
        _require("max_batch_size", self.max_batch_size, 1)
        _require("page_size", self.page_size, 1)
        _require("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        for name, least in (("max_model_len", 2), ("max_queue_size", 0)):
            if getattr(self, name) is not None:
                _require(name, getattr(self, name), least)
        if self.num_verify_tokens is not None:
            _require("num_verify_tokens", self.num_verify_tokens, 2)
        self._check_shape()
        if self.acceptance not in ACCEPTANCES:
            raise UserError(f"acceptance is {self.acceptance!r}, expected one of {ACCEPTANCES}")
        implementations = get_args(Implementation)
        if self.ops not in implementations:
            raise UserError(f"ops is {self.ops!r}, expected one of {implementations}")
        if self.acceptance == "block" and self.topk > 1:
            raise UserError(
                f"acceptance is 'block' with topk {self.topk}: block verification is for chains; "
                "use topk 1, or acceptance 'coupled' for trees"
            )
        timeout = self.request_timeout_s
        if timeout is not None and not timeout > 0:
            raise UserError(f"request_timeout_s is {timeout!r}, expected a number above 0")
        if not self.kv_cache_gib > 0:
            raise UserError(f"kv_cache_gib is {self.kv_cache_gib!r}, expected a number above 0")

    @property
    def shape(self) -> TreeShape | None:
        """Of the drafts of a round; None is plain decoding."""
        if not self.num_speculative_tokens:
            return None
        rows = self.num_verify_tokens or 1 + self.num_speculative_tokens * self.topk
        return TreeShape(self.num_speculative_tokens, self.topk, rows)

    def _check_shape(self) -> None:
        depth, rows = self.num_speculative_tokens, self.num_verify_tokens
        if not depth:
            if self.topk > 1 or rows is not None:
                raise UserError("num_speculative_tokens is 0: topk and num_verify_tokens need 1")
            return
        if self.topk == 1 and rows not in (None, depth + 1):
            raise UserError(
                f"num_verify_tokens is {rows}, expected {depth + 1}: a chain (topk 1) is verified "
                "whole; give topk to draft trees"
            )
        limit = TreeShape(depth, self.topk).limit
        if rows is not None and rows > limit:
            raise UserError(
                f"num_verify_tokens is {rows}, expected at most {limit}: a tree with "
                f"num_speculative_tokens {depth} and topk {self.topk} has no more nodes"
            )


def _require(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} is {value!r}, expected a whole number >= {least}")
