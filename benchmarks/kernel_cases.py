"""Every op once, at the sizes of an 8B target and its draft: what is compiled, checked and timed.

Llama-3.1-8B: hidden 4096, intermediate 14336, 32 query and 8 key heads of 128, vocabulary 128256;
a draft of one layer with a vocabulary of 32000 and three aux states.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from eagle3_serve.ops.draft_head.quantise import quantised_head
from eagle3_serve.ops.tree_attention import Segments
from eagle3_serve.ops.verify import Processing

EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Of a target and its draft."""

    hidden: int = 4096
    intermediate: int = 14336
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    draft_vocab: int = 32000
    aux_states: int = 3
    requests: int = 2
    context: int = 4000  # keys of a request before the pass
    page: int = 16


@dataclass(frozen=True)
class Case:
    """An op with arguments, which stay the same between calls."""

    op: str
    arguments: tuple[Any, ...]
    moved: int  # bytes that have to be read or written whatever the implementation
    options: Mapping[str, Any] = field(default_factory=dict)

    def call(self, implementation: str) -> Callable[[], Any]:
        """The op's `reference` or `triton` function on these arguments."""
        function = getattr(import_module(f"eagle3_serve.ops.{self.op}.{implementation}"), self.op)
        return lambda: function(*self.arguments, **self.options)


def cases(
    device: torch.device,
    sizes: Sizes = Sizes(),
    rows: int = 8,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Case]:
    """Name -> case, with fresh inputs of `rows` rows."""
    s = sizes

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype) / shape[-1] ** 0.5

    x, weight, embedding = draw(rows, s.hidden), draw(s.hidden), draw(s.vocab, s.hidden)
    found = {
        "draft_input": Case(
            "draft_input",
            (_ids(s.vocab, (rows,), device), embedding, x, weight, weight, EPS),
            _bytes(x) * 5,
        ),
        "aux_states": Case(
            "aux_states",
            (
                [draw(rows, s.hidden) for _ in range(s.aux_states)],
                draw(s.aux_states * s.hidden),
                draw(s.aux_states, s.hidden),
                EPS,
            ),
            _bytes(x) * 2 * s.aux_states,
        ),
        "add_rms_norm": Case("add_rms_norm", (x, draw(rows, s.hidden), weight, EPS), 4 * _bytes(x)),
    }
    found |= _attention_cases(draw, s, rows, device)
    found |= _head_cases(draw, s, x, weight, embedding)
    found |= _verify_cases(draw, s, rows, device)
    return found


def _attention_cases(
    draw: Callable[..., Tensor], s: Sizes, rows: int, device: torch.device
) -> dict[str, Case]:
    q, k, v = (draw(rows, n, s.head_dim) for n in (s.query_heads, s.kv_heads, s.kv_heads))
    angles = draw(rows, s.head_dim)
    pages = -(-(s.context + rows) // s.page)
    store = s.kv_heads, s.requests * pages * s.page, s.head_dim
    keys, values = draw(*store), draw(*store)
    slots = torch.arange(rows, device=device)
    packed = s.requests * rows
    queries = draw(packed, s.query_heads, s.head_dim)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    segments = Segments(
        first_row=torch.arange(0, packed, rows, **int32),
        num_rows=torch.full((s.requests,), rows, **int32),
        past=torch.full((s.requests,), s.context, **int32),
        pages=torch.arange(s.requests * pages, **int32).view(s.requests, pages),
        page_size=s.page,
        max_rows=rows,
        max_length=s.context + rows,
    )
    # A chain as a tree: every row sees the rows before it.
    words = (torch.ones(rows, dtype=torch.int64, device=device).cumsum(0) - 1).repeat(s.requests)
    words = (2 << words) - 1
    attention = queries, keys, values, segments, s.head_dim**-0.5
    read = _bytes(keys) + _bytes(values) + 2 * _bytes(queries)
    gate, up = draw(rows, 2 * s.intermediate).chunk(2, -1)
    return {
        "rope_kv": Case(
            "rope_kv",
            (q, k, v, angles, angles, slots, keys, values),
            2 * (_bytes(q) + _bytes(k) + _bytes(v)) + 2 * _bytes(angles),
        ),
        "tree_attention": Case("tree_attention", attention, read),
        "tree_attention tree": Case("tree_attention", attention, read, {"words": words}),
        "swiglu": Case("swiglu", (gate, up), 3 * gate.numel() * gate.element_size()),
    }


def _head_cases(
    draw: Callable[..., Tensor], s: Sizes, x: Tensor, weight: Tensor, embedding: Tensor
) -> dict[str, Case]:
    head = draw(s.draft_vocab, s.hidden)
    codes, scale = quantised_head(head)
    d2t = torch.arange(s.draft_vocab, device=x.device)
    return {
        "draft_head": Case("draft_head", (x, weight, EPS, head, 1, d2t), _bytes(head)),
        "draft_head top 16": Case("draft_head", (x, weight, EPS, head, 16, d2t), _bytes(head)),
        "draft_head float8": Case(
            "draft_head", (x, weight, EPS, codes, 1, d2t, scale), _bytes(codes)
        ),
        "draft_head unpruned": Case(
            "draft_head", (x, weight, EPS, embedding, 8), _bytes(embedding)
        ),
    }


def _verify_cases(
    draw: Callable[..., Tensor], s: Sizes, rows: int, device: torch.device
) -> dict[str, Case]:
    """Chains of `rows` nodes, greedy and with every filter on."""
    batch = s.requests
    # Peaked like a language model's logits, so that filters keep some tokens and not all.
    logits = draw(batch, rows, s.vocab) * (3 * s.vocab**0.5)
    tokens = _ids(s.vocab, (batch, rows), device)
    parents = torch.arange(-1, rows - 1, device=device).repeat(batch, 1)
    coins = torch.rand(batch, rows, device=device)
    full: dict[str, Any] = {"device": device}
    greedy = Processing(
        temperature=torch.zeros(batch, **full),
        top_k=torch.zeros(batch, dtype=torch.int32, **full),
        top_p=torch.ones(batch, **full),
        min_p=torch.zeros(batch, **full),
    )
    sampled = greedy._replace(temperature=torch.ones(batch, **full))
    filtered = sampled._replace(
        top_k=torch.full((batch,), 50, dtype=torch.int32, **full),
        top_p=torch.full((batch,), 0.9, **full),
        min_p=torch.full((batch,), 0.01, **full),
        bias=torch.zeros(batch, s.vocab, **full),
        penalties=torch.full((batch, 3), 1.1, **full),
        counts=torch.zeros(batch, s.vocab, dtype=torch.int32, **full),
        in_prompt=torch.zeros(batch, s.vocab, dtype=torch.bool, **full),
        mask=torch.full((batch, rows, -(-s.vocab // 32)), -1, dtype=torch.int32, **full),
    )
    return {
        name: Case("verify", (logits, tokens, parents, coins, how, rows - 1), _bytes(logits))
        for name, how in (
            ("verify", greedy),
            ("verify sampled", sampled),
            ("verify filtered", filtered),
        )
    }


def _ids(vocab: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randint(vocab, shape, device=device)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
