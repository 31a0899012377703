"""SpecForge's own OnlineEagle3Model on the canonical draft. Runs in the interop environment."""

from pathlib import Path

import pytest
import torch
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from transformers import LlamaConfig

from eagle3_core import DraftConfig, load_draft
from eagle3_core.checkpoint import export_draft
from eagle3_core.specforge import SpecForgeDraft
from eagle3_core.vocab import vocab_map

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 80,
    "draft_vocab_size": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _config(**changes: object) -> DraftConfig:
    return DraftConfig(
        **{
            **SIZES,
            "target_hidden_size": 32,
            "num_aux_hidden_states": 3,
            "rope_parameters": ROPE,
            **changes,
        }
    )


def _draft(config: DraftConfig) -> SpecForgeDraft:
    torch.manual_seed(0)
    draft = SpecForgeDraft(config)
    draft.init_weights(std=0.2)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    d2t, t2d = vocab_map(torch.randperm(config.vocab_size)[: config.draft_vocab_size], 80)
    draft.d2t.copy_(d2t)
    draft.t2d.copy_(t2d)
    draft.freeze_embedding()
    return draft


def _theirs(draft: SpecForgeDraft, fc_norm: bool) -> LlamaForCausalLMEagle3:
    config = LlamaConfig(
        **SIZES, num_hidden_layers=1, pad_token_id=0, rope_parameters=ROPE, fc_norm=fc_norm
    )
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    renamed = {n.replace("layers.0.", "midlayer."): t for n, t in draft.state_dict().items()}
    model.load_state_dict(renamed, strict=True)
    model.freeze_embedding()
    return model


def _losses(draft: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model = OnlineEagle3Model(draft, length=4, attention_backend="sdpa")
    losses = model(**batch)[0]
    sum(0.8**k * loss for k, loss in enumerate(losses)).backward()
    return torch.stack([loss.detach() for loss in losses])


def _batch(padded: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 12, dtype=torch.long)
    if padded:
        mask[1, 9:] = 0
    supervised = (torch.rand(2, 12, generator=generator) > 0.3).long() * mask
    return {
        "input_ids": torch.randint(1, 80, (2, 12), generator=generator),
        "attention_mask": mask,
        "target": 3 * torch.randn(2, 12, 80, generator=generator),
        "loss_mask": supervised[..., None],
        "hidden_states": torch.randn(2, 12, 96, generator=generator),
    }


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_same_losses_and_gradients_as_its_own_draft(fc_norm: bool, padded: bool) -> None:
    """On the same weights and batch, every step's loss and every trainable gradient."""
    ours = _draft(_config(aux_norm="per_layer" if fc_norm else "none"))
    theirs = _theirs(ours, fc_norm)
    # fp32 on both sides: sums of a few hundred terms in another order.
    bound = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(
        _losses(ours, _batch(padded)), _losses(theirs, _batch(padded)), **bound
    )
    grads = {n.replace("midlayer.", "layers.0."): p.grad for n, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, grads[name], **bound)


@pytest.mark.parametrize("layer_input", ["first", "every"])
def test_two_layers_train(layer_input: str) -> None:
    """Where SpecForge's own draft would silently have one layer."""
    draft, batch = _draft(_config(num_hidden_layers=2, layer_input=layer_input)), _batch(False)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(_losses(draft, batch).sum().item())
        assert all(p.grad.abs().sum() > 0 for p in draft.layers[1].parameters())
        optimizer.step()
    assert losses[-1] < losses[0]


def test_its_checkpoints_are_read_and_ours_load_there(tmp_path: Path) -> None:
    """Both directions, every tensor."""
    ours = _draft(_config())
    theirs = _theirs(ours, fc_norm=False)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = load_draft(tmp_path / "theirs")
    assert loaded.report.dialect == "specforge"
    for name, tensor in loaded.draft.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name])
    export_draft(loaded.draft, tmp_path / "ours", "specforge")
    fresh, report = LlamaForCausalLMEagle3.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])
