"""The draft to train: its shape from the target and the config, and the weights it starts from."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle3_core import DraftConfig, Eagle3Draft, UserError
from eagle3_core.config import ROPE_TYPES
from eagle3_core.target import Target, decoder_parts
from eagle3_core.vocab import vocab_map
from eagle3_train.config import DraftSection
from eagle3_train.evaluate import Samples
from eagle3_train.regression import check_startable, start_by_regression


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
        intermediate_size=section.intermediate_size or _intermediate_size(config, target.name),
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
    samples: Samples,
    seed: int,
) -> Eagle3Draft:
    """A draft ready to train, float32, with the target's embeddings.

    Args:
        config: of `draft_config`.
        target: gives the embeddings, and with `init: least_squares` head and final norm.
        section: says where the weights start.
        kept_ids: [D] target ids of a pruned vocabulary; None = unpruned.
        samples: what `init: least_squares` fits.
        seed: of the random weights.

    Raises:
        UserError: `init: least_squares` and sizes that do not fit, or nothing supervised.
    """
    draft = Eagle3Draft(config)
    draft.init_weights(torch.Generator().manual_seed(seed))
    if kept_ids is not None:
        d2t, t2d = vocab_map(kept_ids, config.vocab_size)
        draft.d2t.copy_(d2t)
        draft.t2d.copy_(t2d)
    start_embeddings(draft, target)
    if section.init == "least_squares":
        check_startable(config)
        start_head(draft, target)
        start_by_regression(draft, samples, seed)
    return draft


@torch.no_grad()
def start_embeddings(draft: Eagle3Draft, target: Target) -> None:
    """The target's embeddings, in the draft's width.

    Where the widths differ they are turned into their principal directions: a narrower draft keeps
    the strongest, a wider one has zeros behind them all. Likeness of tokens, a product of two
    embeddings, is thereby kept as well as the width allows.
    """
    theirs = _weight(target.model.get_input_embeddings()).float()
    ours = draft.embed_tokens.weight
    if theirs.shape[1] != ours.shape[1]:
        # Ascending eigenvalues of the Gram matrix [T,T]: the strongest directions come last.
        directions = torch.linalg.eigh(theirs.T @ theirs).eigenvectors.flip(1)
        theirs = theirs @ directions[:, : ours.shape[1]]
        theirs = nn.functional.pad(theirs, (0, ours.shape[1] - theirs.shape[1]))
    _copy(ours, theirs, "embed_tokens")


@torch.no_grad()
def start_head(draft: Eagle3Draft, target: Target) -> None:
    """The target's head rows of the draft vocabulary, and its final norm."""
    kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
    _copy(draft.lm_head.weight, target.lm_head[kept], "lm_head")
    _copy(draft.norm.weight, _weight(decoder_parts(target.model).norm), "norm")


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


def _intermediate_size(config: PretrainedConfig, name: str) -> int:
    size = getattr(config, "intermediate_size", None)
    if size is None:
        raise UserError(
            f"draft.intermediate_size is not set, and the config of target {name} has none to take "
            "over; give it"
        )
    return size


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
