"""What the parameters make of logits, and which token a coin picks."""

import math

import pytest
import torch

from eagle3_core import UserError
from eagle3_serve.sampling import SamplingParams, choose, coin, processed_probs

P = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], dtype=torch.float64)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.1, 0.4, 0.05, 0.3, 0.15]),
        (SamplingParams(temperature=0.5), [x * x / 0.285 for x in (0.1, 0.4, 0.05, 0.3, 0.15)]),
        (SamplingParams(top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (SamplingParams(top_k=-1), [0.1, 0.4, 0.05, 0.3, 0.15]),
        (SamplingParams(top_k=99), [0.1, 0.4, 0.05, 0.3, 0.15]),
        # 0.4 alone does not reach 0.6, 0.4 + 0.3 does.
        (SamplingParams(top_p=0.6), [0, 4 / 7, 0, 3 / 7, 0]),
        (SamplingParams(top_p=0.39), [0, 1, 0, 0, 0]),
        (SamplingParams(top_p=1e-9), [0, 1, 0, 0, 0]),
        # top_k first: of 0.4/0.85, 0.3/0.85, 0.15/0.85 the first two reach 0.8 (0.7 would not).
        (SamplingParams(top_k=3, top_p=0.8), [0, 4 / 7, 0, 3 / 7, 0]),
        # Temperature before both: at 0.5 the masses are .035 .561 .009 .316 .079.
        (SamplingParams(temperature=0.5, top_p=0.56), [0, 1, 0, 0, 0]),
    ],
)
def test_processed_probs(params: SamplingParams, expected: list[float]) -> None:
    probs = processed_probs(P.log() + 7, params)
    torch.testing.assert_close(probs, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-6])
def test_tiny_temperatures_are_greedy_without_nan(temperature: float) -> None:
    probs = processed_probs(P.log().float(), SamplingParams(temperature=temperature))
    assert probs.tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=1)])
def test_greedy_needs_no_coin(params: SamplingParams) -> None:
    assert params.is_greedy
    assert choose(P.log()[None], params, [0.99]).tolist() == [1]


def test_the_coin_picks_its_stretch_of_the_cumulative_distribution() -> None:
    coins = [0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.5499, 0.5501, 0.8499, 0.8501, 1 - 2**-53]
    rows = P.log().expand(len(coins), -1)
    chosen = choose(rows, SamplingParams(), coins)
    assert chosen.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_token_cut_off_is_never_picked() -> None:
    params = SamplingParams(top_k=2)
    coins = [0.0, 0.5714, 0.5715, 1 - 2**-53]
    assert choose(P.log().expand(4, -1), params, coins).tolist() == [1, 1, 3, 3]


def test_coins_are_fixed_by_seed_and_position_and_spread_evenly() -> None:
    assert coin(7, 3) == coin(7, 3)
    # 1 and 23, 12 and 3 must not fall together.
    assert len({coin(1, 23), coin(12, 3), coin(123, 0), coin(-1, 23)}) == 4
    coins = [coin(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(coins)) == len(coins)
    assert all(0 <= c < 1 for c in coins)
    counts = torch.histc(torch.tensor(coins), bins=10, min=0, max=1)
    # A fixed table of 10000 numbers: no chance involved. 5 standard deviations of a bin are 150.
    assert (counts - 1000).abs().max() < 150


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"max_tokens": 0},
        {"stop": ("",)},
    ],
)
def test_refuses_values_out_of_range(field: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(field))):
        SamplingParams(**field)  # type: ignore[arg-type]
