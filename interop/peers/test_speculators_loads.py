"""speculators' own Eagle3DraftModel on what we write, and what it saves read here."""

from pathlib import Path

import pytest
import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_core import DraftConfig, Eagle3Draft, UnrollContext, load_draft
from eagle3_core.checkpoint import export_draft
from eagle3_core.vocab import vocab_map

CASES = {
    "plain": {},
    "two layers": {"num_hidden_layers": 2},
    "full vocabulary": {"draft_vocab_size": 80},
    "norms": {"aux_norm": "concat", "residual": "normed", "feedback": "post_norm"},
    "fc_norm": {"aux_norm": "per_layer", "num_aux_hidden_states": 2, "aux_layer_ids": (3, 7)},
    "qwen3": {"qk_norm": True, "num_hidden_layers": 2},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
}


def _draft(**changes: object) -> Eagle3Draft:
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 80,
        "draft_vocab_size": 24,
        "target_hidden_size": 32,
        "num_target_layers": 8,
        "num_aux_hidden_states": 3,
        "aux_layer_ids": (2, 4, 5),
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        **changes,
    }
    torch.manual_seed(0)
    draft = Eagle3Draft(DraftConfig(**values))
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            low, high = (0.5, 1.5) if "norm" in name else (-0.3, 0.3)
            parameter.uniform_(low, high)
    if draft.config.is_pruned:
        d2t, t2d = vocab_map(torch.randperm(80)[: draft.config.draft_vocab_size], 80)
        draft.d2t.copy_(d2t)
        draft.t2d.copy_(t2d)
    return draft


@torch.no_grad()
def _ours(draft: Eagle3Draft, ids: Tensor, aux: Tensor, steps: int) -> list[Tensor]:
    context, x, out = UnrollContext(), draft.project(aux), []
    for step in range(steps):
        positions = torch.arange(1, ids.shape[1] + 1)[None] + step
        shifted = torch.nn.functional.pad(ids[:, step:], (0, step))
        h = draft(draft.embed(shifted), x, positions, context)
        x = draft.feedback(h)
        out.append(draft.logits(h))
    return out


@torch.no_grad()
def _theirs(model: Eagle3DraftModel, ids: Tensor, aux: Tensor, steps: int) -> list[Tensor]:
    out: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: out.append(call[2]))
    model(
        hidden_states=aux,
        input_ids=ids,
        document_ids=torch.zeros_like(ids),
        ttt_steps=steps,
    )
    hook.remove()
    return out


def _save_target(path: Path, embeddings: Tensor) -> Path:
    """A target whose embeddings are the draft's: speculators loads them from there again."""
    vocab, hidden = embeddings.shape
    shape = {"intermediate_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=hidden, **shape))
    target.get_input_embeddings().weight.data.copy_(embeddings)
    target.save_pretrained(path)
    return path


def _load(path: Path) -> Eagle3DraftModel:
    config = Eagle3SpeculatorConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention wants a GPU
    return Eagle3DraftModel.from_pretrained(path, config=config).eval()


@pytest.mark.parametrize("name", CASES)
def test_same_logits_both_ways(name: str, tmp_path: Path) -> None:
    """We write, it loads every tensor and computes the same; it saves, we read the same back."""
    draft = _draft(**CASES[name])
    target = _save_target(tmp_path / "target", draft.embed_tokens.weight)
    export_draft(draft, tmp_path / "ours", "speculators", target_name=str(target))
    model = _load(tmp_path / "ours")
    held = {n: t for n, t in model.state_dict().items() if not n.startswith("verifier_")}
    assert held.keys() == draft.state_dict().keys()
    for tensor_name, tensor in draft.state_dict().items():
        assert torch.equal(held[tensor_name], tensor)
    ids = torch.randint(1, 80, (1, 10))
    aux = torch.randn(1, 10, draft.config.aux_width)
    for mine, their in zip(_ours(draft, ids, aux, 3), _theirs(model, ids, aux, 3), strict=True):
        # fp32 on both sides; its attention and our plain softmax round differently.
        torch.testing.assert_close(mine, their, rtol=0, atol=5e-5)
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.py").unlink(missing_ok=True)
    loaded = load_draft(tmp_path / "theirs", overrides={"num_target_layers": 8})
    assert loaded.config == draft.config
    for tensor_name, tensor in loaded.draft.state_dict().items():
        assert torch.equal(tensor, draft.state_dict()[tensor_name])
