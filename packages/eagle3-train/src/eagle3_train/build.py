"""The draft to train: its shape from the target and the config, and the weights it starts from."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle3_core import DraftConfig, Eagle3Draft, UserError
from eagle3_core.config import ROPE_TYPES
from eagle3_core.target import Target, decoder_parts
from eagle3_core.vocab import vocab_map
from eagle3_train.config import DraftSection


def draft_config(
    section: DraftSection, target: Target, aux_layer_ids: tuple[int, ...], draft_vocab_size: int
) -> DraftConfig:
    """Fill what the section leaves open from the target.

    Raises:
        UserError: the result contradicts itself.
    """
    config = target.config
    heads = section.num_attention_heads or config.num_attention_heads
    given_head_dim = section.head_dim or getattr(config, "head_dim", None)
    hidden = section.hidden_size or target.hidden_size
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=section.intermediate_size or config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=section.num_key_value_heads
        or getattr(config, "num_key_value_heads", None)
        or heads,
        head_dim=given_head_dim or hidden // heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_hidden_layers=section.num_hidden_layers,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        num_aux_hidden_states=len(aux_layer_ids),
        aux_layer_ids=aux_layer_ids,
        layer_input=section.layer_input,
        aux_norm=section.aux_norm,
        residual=section.residual,
        feedback=section.feedback,
        sliding_window=section.sliding_window,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        max_position_embeddings=section.max_position_embeddings or target.max_position_embeddings,
        rope_parameters=_rope(config),
    )


def build_draft(
    config: DraftConfig,
    target: Target,
    section: DraftSection,
    kept_ids: Tensor | None,
    seed: int,
) -> Eagle3Draft:
    """A draft ready to train, float32.

    Args:
        config: of `draft_config`.
        target: gives the embeddings, and with `init: target` more.
        section: says where the weights start.
        kept_ids: [D] target ids of a pruned vocabulary; None = unpruned.
        seed: of the random weights.

    Raises:
        UserError: `init: target` and shapes that do not fit.
    """
    draft = Eagle3Draft(config)
    draft.init_weights(torch.Generator().manual_seed(seed))
    if kept_ids is not None:
        d2t, t2d = vocab_map(kept_ids, config.vocab_size)
        draft.d2t.copy_(d2t)
        draft.t2d.copy_(t2d)
    with torch.no_grad():
        if config.hidden_size == target.hidden_size:
            start_embeddings(draft, target)
        if section.init == "target":
            start_head(draft, target)
            start_fc(draft)
            start_layers(draft, target, section.init_layer)
    return draft


def start_embeddings(draft: Eagle3Draft, target: Target) -> None:
    """The target's embeddings."""
    _copy(draft.embed_tokens.weight, _weight(target.model.get_input_embeddings()), "embed_tokens")


def start_head(draft: Eagle3Draft, target: Target) -> None:
    """The target's head rows of the draft vocabulary, and its final norm."""
    kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
    _copy(draft.lm_head.weight, target.lm_head[kept], "lm_head")
    _copy(draft.norm.weight, _weight(decoder_parts(target.model).norm), "norm")


def start_fc(draft: Eagle3Draft) -> None:
    """Pass the deepest aux state through unchanged."""
    if not draft.config.has_fc:
        return
    width = draft.config.target_hidden_size
    if draft.config.hidden_size != width:
        raise UserError(_misfit("hidden_size", draft.config.hidden_size, width))
    draft.fc.weight.zero_()
    draft.fc.weight[:, -width:] = torch.eye(width)


def start_layers(draft: Eagle3Draft, target: Target, last: int) -> None:
    """Copy target layers ending with `last`; what reads the embedding starts at zero."""
    layers = decoder_parts(target.model).layers
    if not -len(layers) <= last < len(layers):
        raise UserError(
            f"draft.init_layer is {last}, expected {-len(layers)}..{len(layers) - 1}: "
            f"the target has {len(layers)} layers"
        )
    depth = len(draft.layers)
    for i, module in enumerate(draft.layers):
        source = layers[max(0, last % len(layers) - (depth - 1 - i))]
        names = dict(source.named_parameters())
        sees_embedding = draft.config.sees_embedding(i)
        for name, parameter in module.named_parameters():
            if name == "input_layernorm.weight" and sees_embedding:
                continue  # norms the embedding, for which the target has no counterpart
            wanted = "input_layernorm.weight" if name == "hidden_norm.weight" else name
            if wanted not in names:
                raise UserError(
                    f"draft.init: target has no {wanted} in its layers; use draft.init: random"
                )
            value = names[wanted]
            if sees_embedding and name.startswith(("self_attn.q_", "self_attn.k_", "self_attn.v_")):
                value = torch.cat([torch.zeros_like(value), value], dim=-1)
            _copy(parameter, value, f"layers.{i}.{name}")


def _copy(parameter: Tensor, value: Tensor, name: str) -> None:
    if parameter.shape != value.shape:
        raise UserError(_misfit(name, tuple(parameter.shape), tuple(value.shape)))
    parameter.copy_(value)


def _misfit(name: str, draft: object, target: object) -> str:
    return (
        f"draft.init: {name} is {draft} in the draft and {target} in the target; "
        "use draft.init: random or leave the draft's sizes to the target"
    )


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _rope(config: PretrainedConfig) -> dict[str, object]:
    """The target's rope where the draft knows its type, else plain rope at the target's theta."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    nested = [value for value in found.values() if isinstance(value, dict)]
    if nested:  # one set for each layer type: the draft attends to everything
        found = dict(found.get("full_attention", nested[0]))
    theta = found.get("rope_theta", 10000.0)
    if found.get("rope_type", "default") not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "default", "rope_theta": theta, **found}
