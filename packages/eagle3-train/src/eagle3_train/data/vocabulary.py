"""Which target tokens a pruned draft can propose: those that the target most often writes.

Nothing is cached: the choice follows from the data at hand, so it can't be stale.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eagle3_core import UserError
from eagle3_core.vocab import most_frequent
from eagle3_train.data.mask import Example

_PROMPT_WEIGHT = 1e-3  # prompts only decide among tokens that answers say nothing about


def token_counts(examples: Iterable[Example], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Occurrences of each id among supervised tokens and among all others.

    Returns:
        [V] and [V] float64.

    Raises:
        UserError: an id is not in the target's vocabulary.
    """
    supervised = torch.zeros(vocab_size, dtype=torch.float64)
    other = torch.zeros(vocab_size, dtype=torch.float64)
    for example in examples:
        ids, mask = example.input_ids, example.loss_mask
        if int(ids.max()) >= vocab_size:
            raise UserError(
                f"{example.where}: token id {int(ids.max())} is beyond the target's vocabulary of "
                f"{vocab_size}; data and target do not belong together"
            )
        supervised += torch.bincount(ids[mask], minlength=vocab_size)
        other += torch.bincount(ids[~mask], minlength=vocab_size)
    return supervised, other


def choose_vocabulary(
    examples: Sequence[Example],
    vocab_size: int,
    size: int,
    *,
    target_mass: Tensor | None = None,
    always: tuple[int, ...] = (),
) -> Tensor:
    """[D] target ids, ascending: the most likely to be written.

    An id scores its occurrences in the answers plus the target's own expectation of it there. The
    second part tells frequent ids from rare ones among those that little text never shows.

    Args:
        examples: the training examples.
        vocab_size: V of the target.
        size: D.
        target_mass: [V] the target's next-token probabilities summed over the answers' positions.
        always: ids kept whatever their score, such as end-of-turn.

    Raises:
        UserError: size is out of range, or an id is not in the target's vocabulary.
    """
    score, other = token_counts(examples, vocab_size)
    if target_mass is not None:
        score = score + target_mass
    return most_frequent(score + _PROMPT_WEIGHT * other, size, always)


def coverage(t2d: Tensor, examples: Iterable[Example]) -> float:
    """Share of supervised tokens that a draft vocabulary (t2d: [V] bool) can propose."""
    supervised, _ = token_counts(examples, len(t2d))
    return float(supervised[t2d].sum() / supervised.sum().clamp(min=1))
