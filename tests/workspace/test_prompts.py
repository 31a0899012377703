"""The demo's prompt sets: well-formed, varied, and nothing held out is trained on."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def grams(text: str, n: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


@pytest.fixture(scope="module")
def train(root: Path) -> list[dict[str, str]]:
    # The second file is for the long demo.
    return rows(root / "demo/prompts.jsonl") + rows(root / "demo/more-prompts.jsonl")


@pytest.fixture(scope="module")
def heldout(root: Path) -> list[dict[str, str]]:
    return rows(root / "demo/heldout.jsonl")


def test_rows_are_well_formed_and_distinct(
    train: list[dict[str, str]], heldout: list[dict[str, str]]
) -> None:
    both = train + heldout
    assert all(row.keys() == {"id", "kind", "prompt"} for row in both)
    assert all(row["prompt"].strip() == row["prompt"] != "" for row in both)
    assert len({row["id"] for row in both}) == len(both)
    assert len({re.sub(r"\W+", " ", row["prompt"].lower()) for row in both}) == len(both)


def test_sets_are_broad(train: list[dict[str, str]], heldout: list[dict[str, str]]) -> None:
    kinds = Counter(row["kind"] for row in train)
    assert len(train) >= 1500
    assert len(kinds) >= 20
    assert max(kinds.values()) < len(train) / 5
    assert len(heldout) >= 64
    assert {row["kind"] for row in heldout} == set(kinds)


def test_held_out_wording_is_not_trained_on(
    train: list[dict[str, str]], heldout: list[dict[str, str]]
) -> None:
    """No four words in a row in common: neither a template nor a subject comes back."""
    trained = set().union(*(grams(row["prompt"], 4) for row in train))
    shared = {row["id"]: grams(row["prompt"], 4) & trained for row in heldout}
    assert {name: words for name, words in shared.items() if words} == {}
