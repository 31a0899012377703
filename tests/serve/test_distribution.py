"""Sampled output with a draft has exactly the target's law: proven by enumeration, not by counting.

The three coins of a three-token output fill a unit cube. Each sequence owns the box that the
cumulative distributions of the target cut out along its path, and the boxes fill the cube. Their
volumes are products of the target's conditional probabilities, which is the law of plain sampling.
So the engine is exact if coins from a sequence's box always give that sequence: checked in every
box, near its borders and inside, whatever the draft proposes.
"""

import itertools
import math
from typing import Any

import pytest
import torch

from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate
from eagle3_serve.sampling import SamplingParams, coin

V, LENGTH, PROMPT = 5, 3, [1, 3]
# The engine's logits differ from the reference's by float rounding (norms run in fp32), so coins
# this close to a border say nothing.
MARGIN = 1e-5
SETTINGS = [
    SamplingParams(max_tokens=LENGTH, ignore_eos=True),
    SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.5, top_k=4),
    SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=2.0, top_p=0.8),
]


def _law(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """Temperature, top_k, top_p in plain Python."""
    weights = [float(x) for x in (logits.double() / params.temperature).softmax(-1)]
    ranked = sorted(range(V), key=lambda i: -weights[i])
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, mass, kept = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if mass / total < params.top_p:
            kept.append(i)
            mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(V)]


def _boxes(target: Any, params: SamplingParams) -> dict[tuple[int, ...], list[tuple[float, float]]]:
    """Every sequence of positive probability, with the coins that plain sampling reads it from."""
    boxes: dict[tuple[int, ...], list[tuple[float, float]]] = {(): []}
    for _ in range(LENGTH):
        longer = {}
        for path, sides in boxes.items():
            law = _law(target.model(torch.tensor([[*PROMPT, *path]])).logits[0, -1], params)
            edges = [0.0, *itertools.accumulate(law)]
            for token, share in enumerate(law):
                if share > 0:
                    longer[*path, token] = [*sides, (edges[token], edges[token + 1])]
        boxes = longer
    return boxes


def _seeds(sides: list[tuple[float, float]], coins: torch.Tensor) -> list[int]:
    """Seeds whose coins lie in a box: the innermost one and those nearest to each border."""
    low, high = torch.tensor(sides, dtype=torch.float64).T
    depth = torch.minimum(coins - low, high - coins)  # [seeds, LENGTH], negative outside
    inside = (depth.amin(1) > MARGIN).nonzero()[:, 0]
    if not len(inside):
        return []
    picks = {int(inside[depth[inside].amin(1).argmax()])}
    picks |= {int(inside[i]) for i in (coins[inside] - low).argmin(0)}
    picks |= {int(inside[i]) for i in (high - coins[inside]).argmin(0)}
    return sorted(picks)


@pytest.fixture(scope="module")
def coins() -> torch.Tensor:
    """[seeds, LENGTH] coins that the engine will use at the output's positions."""
    positions = range(len(PROMPT), len(PROMPT) + LENGTH)
    rows = [[coin(seed, position) for position in positions] for seed in range(100_000)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("params", SETTINGS, ids=["plain", "top_k", "top_p"])
@pytest.mark.parametrize("draft_vocab_size", [V, 3])
def test_every_sequence_has_exactly_its_share_of_the_coins(
    pairs: Any, coins: torch.Tensor, params: SamplingParams, draft_vocab_size: int
) -> None:
    target = pairs.target(torch.float64, vocab_size=V)
    draft = pairs.draft(target, draft_vocab_size=draft_vocab_size)
    boxes = _boxes(target, params)
    volumes = [math.prod(b - a for a, b in sides) for sides in boxes.values()]
    # Float64 sums of at most 125 products.
    assert abs(sum(volumes) - 1) < 1e-9
    jobs = [(path, seed) for path, sides in boxes.items() for seed in _seeds(sides, coins)]
    tried = {path for path, _ in jobs}
    assert sum(v for p, v in zip(boxes, volumes, strict=True) if p not in tried) < 1e-3
    for k, topk in ((1, 1), (2, 1), (2, 2)):
        config = EngineConfig(num_speculative_tokens=k, topk=topk, max_batch_size=16)
        engine = Engine(target, draft, config)
        own = [_seeded(params, seed) for _, seed in jobs]
        outputs, figures = generate(engine, [PROMPT] * len(jobs), own)
        assert [tuple(o.token_ids) for o in outputs] == [path for path, _ in jobs]
        # Both outcomes of a draft took part.
        assert 0 < figures["num_accepted_tokens"] < figures["num_drafted_tokens"]


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{**vars(params), "seed": seed})
