"""Every op called once, at the sizes of an 8B target and its draft: what is compiled and measured.

Llama-3.1-8B: hidden 4096, intermediate 14336, 32 query and 8 key heads of 128, vocabulary 128256;
a draft of one layer with a vocabulary of 32000 and three aux states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eagle3_serve.ops.add_rms_norm.triton import add_rms_norm
from eagle3_serve.ops.aux_states.triton import aux_states
from eagle3_serve.ops.draft_head.triton import draft_head
from eagle3_serve.ops.draft_input.triton import draft_input
from eagle3_serve.ops.rope_kv.triton import rope_kv
from eagle3_serve.ops.swiglu.triton import swiglu

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
    slots: int = 4096


def launches(
    device: torch.device,
    sizes: Sizes = Sizes(),
    rows: int = 8,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Callable[[], Any]]:
    """Name -> a call of the op with fresh inputs of `rows` rows, made once, on `device`."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype) / shape[-1] ** 0.5

    s = sizes
    ids = torch.randint(s.draft_vocab, (rows,), device=device)
    x, weight = draw(rows, s.hidden), draw(s.hidden)
    embedding = draw(s.vocab, s.hidden)
    heads = s.query_heads, s.kv_heads, s.kv_heads
    q, k, v = (draw(rows, n, s.head_dim) for n in heads)
    angles = draw(rows, s.head_dim)
    keys, values = (draw(s.kv_heads, s.slots, s.head_dim) for _ in range(2))
    slots = torch.arange(rows, device=device)
    gate, up = draw(rows, 2 * s.intermediate).chunk(2, -1)
    head = draw(s.draft_vocab, s.hidden)
    codes = head.to(torch.float8_e4m3fn)
    scale = torch.ones(s.draft_vocab, device=device)
    d2t = torch.arange(s.draft_vocab, device=device)
    states = [draw(rows, s.hidden) for _ in range(s.aux_states)]
    concat = draw(s.aux_states * s.hidden)
    per_layer = draw(s.aux_states, s.hidden)
    return {
        "draft_input": lambda: draft_input(ids, embedding, x, weight, weight, EPS),
        "aux_states": lambda: aux_states(states, concat, per_layer, EPS),
        "add_rms_norm": lambda: add_rms_norm(x, x, weight, EPS),
        "rope_kv": lambda: rope_kv(q, k, v, angles, angles, slots, keys, values),
        "swiglu": lambda: swiglu(gate, up),
        "draft_head": lambda: draft_head(x, weight, EPS, head, 1, d2t),
        "draft_head top 16": lambda: draft_head(x, weight, EPS, head, 16, d2t),
        "draft_head float8": lambda: draft_head(x, weight, EPS, codes, 1, d2t, scale),
        "draft_head unpruned": lambda: draft_head(x, weight, EPS, embedding, 8),
    }
