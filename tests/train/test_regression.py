"""A draft that starts by least squares: exact where the data is linear, useful where it is not."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eagle3_core import CacheContext, DraftConfig, Eagle3Draft, UserError
from eagle3_train.regression import start_by_regression

H, V, HEAD_DIM = 32, 64, 16


def draft_config(**changes: object) -> DraftConfig:
    values = {
        "hidden_size": H,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": HEAD_DIM,
        "vocab_size": V,
        "draft_vocab_size": V,
        "target_hidden_size": H,
        "num_aux_hidden_states": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return DraftConfig(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def new_draft(config: DraftConfig) -> Eagle3Draft:
    draft = Eagle3Draft(config)
    draft.init_weights(torch.Generator().manual_seed(0), std=1.0)
    with torch.no_grad():
        draft.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    return draft


def unit(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


class Samples(list[SimpleNamespace]):
    """Sequences whose target state follows linearly from the token and the state before."""

    def __init__(self, draft: Eagle3Draft, count: int) -> None:
        g = torch.Generator().manual_seed(2)
        turn = torch.linalg.qr(torch.randn(H, H, generator=g)).Q
        mix = torch.randn(H, H, generator=g) * 0.3
        spread = torch.randn(H, 2 * H, generator=g)
        for _ in range(count):
            ids = torch.randint(0, V, (24,), generator=g)
            y = [unit(torch.randn(H, generator=g))]
            for token in ids[1:]:
                y.append(unit(y[-1] @ turn + unit(draft.embed_tokens.weight[token]) @ mix))
            states = torch.stack(y).detach()
            self.append(
                SimpleNamespace(
                    input_ids=ids,
                    loss_mask=torch.arange(24) >= 4,
                    aux=states @ spread,
                    final=states * draft.norm.weight.detach(),
                    argmax=torch.zeros(24),
                )
            )
        self.lengths = [24] * count


def explained(draft: Eagle3Draft, sample: SimpleNamespace, step_two: bool = False) -> float:
    """Share of the next state's variance that the draft's state explains, over one sample."""
    with torch.no_grad():
        positions = torch.arange(22)[None]
        x = draft.project(sample.aux[None, :22].float())
        h = draft(draft.embed(sample.input_ids[None, 1:23]), x, positions, CacheContext())[0]
        wanted = sample.final[1:23] / draft.norm.weight
        if step_two:
            # Every slot starts the second step by itself, as a chain of two from that slot does.
            x, e = draft.feedback(h)[:-1], draft.embed(sample.input_ids[2:23])
            rows = [
                draft(e[i][None, None], x[i][None, None], torch.tensor([[i + 1]]), CacheContext())
                for i in range(len(x))
            ]
            h, wanted = torch.cat(rows)[:, 0], wanted[1:]
        error = (unit(h) - unit(wanted)).square().sum() / unit(wanted).square().sum()
    return 1 - float(error)


@pytest.mark.parametrize("feedback", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("residual", ["raw", "normed"])
@pytest.mark.parametrize("aux_norm", ["none", "per_layer", "concat"])
def test_linear_target_is_met(feedback: str, residual: str, aux_norm: str) -> None:
    config = draft_config(feedback=feedback, residual=residual, aux_norm=aux_norm)
    draft = new_draft(config)
    samples = Samples(draft, 150)
    start_by_regression(draft, samples, seed=0)
    fresh = Samples(draft, 160)[155]
    # Rounding of states to unit length and leaks of attention keep it from 1; chance is below 0.
    assert explained(draft, fresh) > 0.8, explained(draft, fresh)


def test_second_step_continues_the_first() -> None:
    draft = new_draft(draft_config())
    start_by_regression(draft, Samples(draft, 150), seed=0)
    fresh = Samples(draft, 160)[155]
    assert explained(draft, fresh, step_two=True) > 0.6


def test_shared_value_heads_keep_the_strongest_directions() -> None:
    wide, narrow = new_draft(draft_config()), new_draft(draft_config(num_key_value_heads=1))
    for draft in (wide, narrow):
        start_by_regression(draft, Samples(draft, 150), seed=0)
    fresh = Samples(wide, 160)[155]
    assert 0.2 < explained(narrow, fresh) < explained(wide, fresh)


@pytest.mark.parametrize("layer_input", ["first", "every"])
def test_deeper_layers_start_as_identity(layer_input: str) -> None:
    one = new_draft(draft_config())
    three = new_draft(draft_config(num_hidden_layers=3, layer_input=layer_input))
    three.embed_tokens.load_state_dict(one.embed_tokens.state_dict())
    samples = Samples(one, 60)
    for draft in (one, three):
        assert start_by_regression(draft, samples, seed=0) > 0
    sample = samples[0]
    x, e = one.project(sample.aux[None]), one.embed(sample.input_ids[None])
    positions = torch.arange(24)[None]
    assert torch.equal(one(e, x, positions, CacheContext()), three(e, x, positions, CacheContext()))


def test_same_seed_same_start() -> None:
    drafts = [new_draft(draft_config()) for _ in range(2)]
    for draft in drafts:
        start_by_regression(draft, Samples(draft, 40), seed=3)
    for name, value in drafts[0].state_dict().items():
        assert torch.equal(value, drafts[1].state_dict()[name]), name


def test_refusals() -> None:
    draft = new_draft(draft_config(target_hidden_size=16))
    with pytest.raises(UserError, match=r"hidden_size 32 to equal the target's 16"):
        start_by_regression(draft, Samples(new_draft(draft_config()), 1), seed=0)
    draft = new_draft(draft_config())
    samples = Samples(draft, 2)
    for sample in samples:
        sample.loss_mask[:] = False
    with pytest.raises(UserError, match="no slot of the training data is supervised"):
        start_by_regression(draft, samples, seed=0)
