"""The draft's cos/sin tables against the rope formulas of each type, written out in float64.

Sources: RoFormer (arXiv 2104.09864); position interpolation (2306.15595) for `linear`; NTK-aware
scaling by current length for `dynamic`; YaRN (2309.00071); Llama 3.1's reference code for `llama3`.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_core import CacheContext, DraftConfig, Eagle3Draft, TorchOps

HEAD_DIM, THETA, MAX_POSITIONS = 16, 500.0, 64
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    "yarn, all keys": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
        "mscale": None,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


def make_draft(rope: dict[str, Any], ops: TorchOps | None = None) -> Eagle3Draft:
    config = DraftConfig(
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        vocab_size=8,
        draft_vocab_size=8,
        target_hidden_size=8,
        num_aux_hidden_states=1,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": THETA, **rope},
    )
    return Eagle3Draft(config, ops)


class TableRecorder(TorchOps):
    """Keeps the tables that the draft hands to `rope`."""

    tables: tuple[Tensor, Tensor]

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        self.tables = cos[0], sin[0]
        return super().rope(q, k, cos, sin)


def draft_tables(
    rope: dict[str, Any], positions: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin [len(positions), HEAD_DIM] as the draft uses them."""
    recorder = TableRecorder()
    draft = make_draft(rope, recorder).to(dtype)
    x = torch.zeros(1, len(positions), 8, dtype=dtype)
    with torch.no_grad():
        draft(x, x, positions[None], CacheContext())
    return recorder.tables


def base_frequencies(theta: float = THETA) -> list[float]:
    return [theta ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]


def yarn_frequencies(rope: dict[str, Any]) -> tuple[list[float], float]:
    factor, context = rope["factor"], rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The frequency index whose wave turns so often within the original context."""
        return HEAD_DIM * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = dimension(rope.get("beta_fast", 32.0)), dimension(rope.get("beta_slow", 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, HEAD_DIM - 1)
    frequencies = []
    for i, frequency in enumerate(base_frequencies()):
        scaled = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(frequency / factor * scaled + frequency * (1 - scaled))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in rope:
        return frequencies, rope["attention_factor"]
    if "mscale" in rope:
        return frequencies, mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return frequencies, mscale(1.0)


def llama3_frequency(frequency: float, rope: dict[str, Any]) -> float:
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if turns > high:
        return frequency
    if turns < low:
        return frequency / rope["factor"]
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def frequencies_and_scale(rope: dict[str, Any], length: int) -> tuple[list[float], float]:
    """Angles per position, and what multiplies cos and sin, for a sequence of `length`."""
    match rope["rope_type"]:
        case "linear":
            return [frequency / rope["factor"] for frequency in base_frequencies()], 1.0
        case "dynamic":
            stretch = rope["factor"] * max(length, MAX_POSITIONS) / MAX_POSITIONS
            stretch -= rope["factor"] - 1
            return base_frequencies(THETA * stretch ** (HEAD_DIM / (HEAD_DIM - 2))), 1.0
        case "yarn":
            return yarn_frequencies(rope)
        case "llama3":
            return [llama3_frequency(frequency, rope) for frequency in base_frequencies()], 1.0
    return base_frequencies(), 1.0


@pytest.mark.parametrize("last", [MAX_POSITIONS - 1, 200])
@pytest.mark.parametrize("name", ROPES)
def test_tables_are_the_formulas(name: str, last: int) -> None:
    rope = ROPES[name]
    positions = torch.arange(0, last + 1)
    frequencies, scale = frequencies_and_scale(rope, length=last + 1)
    angles = positions.double()[:, None] * torch.tensor(frequencies * 2, dtype=torch.float64)
    # A frequency goes through some eight fp32 roundings (2^-24 each) and is multiplied by up to
    # `last`; one position's difference is at least 1e-3 in some entry, hundreds of times as much.
    tolerance = 8 * 2**-24 * (last + 1)
    cos, sin = draft_tables(rope, positions)
    torch.testing.assert_close(cos.double(), angles.cos() * scale, rtol=0, atol=tolerance)
    torch.testing.assert_close(sin.double(), angles.sin() * scale, rtol=0, atol=tolerance)


def test_the_rope_types_differ() -> None:
    """So that none of the formulas above could stand in for another."""
    tables = {name: draft_tables(rope, torch.tensor([199])) for name, rope in ROPES.items()}
    for name, (cos, _) in tables.items():
        others = [other for key, (other, _) in tables.items() if key != name]
        assert all((cos - other).abs().max() > 1e-2 for other in others)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_drafts_keep_fp32_angles(name: str, dtype: torch.dtype) -> None:
    """Frequencies rounded to bf16 would be off by whole radians at position 4000."""
    positions = torch.arange(3990, 4011)
    exact, rounded = (
        draft_tables(ROPES[name], positions),
        draft_tables(ROPES[name], positions, dtype),
    )
    for wide, narrow in zip(exact, rounded, strict=True):
        assert narrow.dtype == dtype
        assert torch.equal(narrow, wide.to(dtype))


def test_tables_survive_a_change_of_dtype_after_use() -> None:
    recorder = TableRecorder()
    draft = make_draft(ROPES["llama3"], recorder)
    x, positions = torch.zeros(1, 2, 8), torch.tensor([[3999, 4000]])
    expected = draft_tables(ROPES["llama3"], positions[0])
    with torch.no_grad():
        draft(x, x, positions, CacheContext())
        draft.to(torch.bfloat16).float()(x, x, positions, CacheContext())
    assert all(map(torch.equal, recorder.tables, expected))


def test_tables_are_not_part_of_the_checkpoint() -> None:
    names = set(make_draft(ROPES["default"]).state_dict())
    assert not {name for name in names if "rotary" in name or "inv_freq" in name}


def test_scores_depend_on_distances_only() -> None:
    """Where positions start cannot matter: producers start at 0 or at 1."""
    draft = make_draft(ROPES["default"]).double()
    draft.init_weights(torch.Generator().manual_seed(0), std=0.5)
    generator = torch.Generator().manual_seed(1)
    e, x = torch.randn(2, 1, 5, 8, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        here = draft(e, x, torch.arange(5)[None], CacheContext())
        there = draft(e, x, torch.arange(5)[None] + 1, CacheContext())
        spread = draft(e, x, 2 * torch.arange(5)[None], CacheContext())
    # The tables are rounded to fp32 (6e-8 an entry), so a shift shows in the seventh digit.
    torch.testing.assert_close(here, there, rtol=0, atol=1e-5)
    assert (here - spread).abs().max() > 1e-3
