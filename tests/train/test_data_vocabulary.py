"""The draft vocabulary: what answers use, then what the target expects, then what prompts use."""

import pytest
import torch

from eagle3_core import UserError
from eagle3_train.data import Example, choose_vocabulary, coverage, token_counts

EXAMPLE = Example(
    "file:1",
    torch.tensor([9, 9, 9, 3, 3, 5]),
    torch.tensor([False, False, False, True, True, True]),
)


def test_only_supervised_tokens_count() -> None:
    supervised, other = token_counts([EXAMPLE, EXAMPLE], 12)
    assert supervised.tolist() == [0, 0, 0, 4, 0, 2, 0, 0, 0, 0, 0, 0]
    assert other.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0]


def test_prompts_decide_among_tokens_the_answers_never_show() -> None:
    assert choose_vocabulary([EXAMPLE], 12, 2).tolist() == [3, 5]
    assert choose_vocabulary([EXAMPLE], 12, 3).tolist() == [3, 5, 9]
    assert choose_vocabulary([EXAMPLE], 12, 4, always=(11,)).tolist() == [3, 5, 9, 11]


def test_the_targets_own_expectation_fills_the_rest() -> None:
    mass = torch.zeros(12, dtype=torch.float64)
    mass[[7, 8, 5]] = torch.tensor([0.2, 0.3, 0.1], dtype=torch.float64)
    assert choose_vocabulary([EXAMPLE], 12, 3, target_mass=mass).tolist() == [3, 5, 8]
    assert choose_vocabulary([EXAMPLE], 12, 5, target_mass=mass).tolist() == [3, 5, 7, 8, 9]


def test_another_size_or_other_data_gives_another_choice() -> None:
    """Nothing is remembered between calls."""
    other = Example("file:2", EXAMPLE.input_ids + 2, EXAMPLE.loss_mask)
    assert choose_vocabulary([EXAMPLE], 12, 2).tolist() == [3, 5]
    assert choose_vocabulary([other], 12, 2).tolist() == [5, 7]
    assert choose_vocabulary([other], 12, 1).tolist() == [5]


def test_coverage_of_new_data_by_a_kept_map() -> None:
    t2d = torch.zeros(12, dtype=torch.bool)
    t2d[[3, 9]] = True
    assert coverage(t2d, [EXAMPLE]) == 2 / 3


def test_ids_of_another_tokenizer_are_refused() -> None:
    with pytest.raises(UserError, match="file:1: token id 9 is beyond"):
        choose_vocabulary([EXAMPLE], 9, 2)


def test_a_size_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match=r"draft_vocab_size is 13, expected 1\.\.12"):
        choose_vocabulary([EXAMPLE], 12, 13)
