"""What a draft takes from its target before training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from eagle3_core import UserError
from eagle3_core.target import Target
from eagle3_train.build import build_draft, draft_config
from eagle3_train.capture import Capturer, OnlineFeatures
from eagle3_train.config import DraftSection

AUX = (1, 2, 4)


def build(target: Target, **section: Any) -> torch.Tensor:
    """The embeddings [V,H]."""
    settings = DraftSection(**section)
    config = draft_config(settings, target, AUX, target.vocab_size)
    samples = OnlineFeatures(Capturer(target, AUX, torch.float32), [])
    return build_draft(config, target, settings, None, samples, seed=0).embed_tokens.weight.detach()


def test_embeddings_of_the_targets_width_are_the_targets(target: Target) -> None:
    assert torch.equal(build(target), target.model.get_input_embeddings().weight)


def test_a_wider_draft_keeps_all_likeness_of_tokens(target: Target) -> None:
    theirs, ours = target.model.get_input_embeddings().weight, build(target, hidden_size=40)
    assert not ours[:, 32:].any()
    # A rotation in float32.
    torch.testing.assert_close(ours @ ours.T, theirs @ theirs.T, rtol=1e-4, atol=1e-4)


def test_a_narrower_draft_keeps_as_much_as_its_width_allows(target: Target) -> None:
    theirs, ours = target.model.get_input_embeddings().weight, build(target, hidden_size=24)
    strongest = torch.linalg.svdvals(theirs.double())[:24]
    # Eckart-Young: no 24 columns hold more. Singular values of float32 products.
    torch.testing.assert_close(torch.linalg.svdvals(ours.double()), strongest, rtol=1e-3, atol=0)


def test_least_squares_needs_the_targets_width(target: Target) -> None:
    with pytest.raises(UserError, match="needs hidden_size 24 to equal the target's 32"):
        build(target, hidden_size=24, init="least_squares")


def test_a_target_that_states_no_mlp_width(make_target: Callable[..., Target]) -> None:
    target = make_target(kind=GPT2Config, intermediate_size=None, n_embd=32, n_layer=4, n_head=4)
    with pytest.raises(UserError, match=r"draft\.intermediate_size is not set, .* target random"):
        build(target)
