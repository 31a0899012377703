"""Every semantic choice of an EAGLE-3 draft, stated once, validated once."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from eagle3_core.errors import UserError

LayerInput = Literal["first", "every"]
AuxNorm = Literal["none", "per_layer", "concat", "concat_per_layer"]
Residual = Literal["raw", "normed"]
Feedback = Literal["pre_norm", "post_norm"]

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

_CHOICES = {"layer_input": LayerInput, "aux_norm": AuxNorm, "residual": Residual, "feedback": Feedback}


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape and semantics of a draft. Sizes are counts, ids are boundary ids.

    A boundary id c names the target's residual stream entering layer c, so c runs from 0
    (the embeddings) to `num_target_layers` (the last state, before the final norm).

    Raises:
        UserError: a field is out of range or contradicts another.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    num_hidden_layers: int = 1
    target_hidden_size: int
    num_target_layers: int | None = None
    num_aux_hidden_states: int
    aux_layer_ids: tuple[int, ...] | None = None  # boundary ids, ascending
    layer_input: LayerInput = "first"  # which layers see the embedding
    aux_norm: AuxNorm = "none"
    residual: Residual = "raw"  # what layer 0's (every layer's) residual path carries
    feedback: Feedback = "pre_norm"  # what the next step takes in place of the projected aux states
    has_fc: bool = True
    fc_bias: bool = False
    attention_bias: bool = False  # q, k, v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rope_parameters: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Normalise containers, then check every rule."""
        object.__setattr__(self, "rope_parameters", dict(self.rope_parameters))
        if self.aux_layer_ids is not None:
            object.__setattr__(self, "aux_layer_ids", tuple(self.aux_layer_ids))
        self._check_sizes()
        for name, choices in _CHOICES.items():
            _require(name, getattr(self, name) in get_args(choices), getattr(self, name),
                     "one of " + ", ".join(get_args(choices)))
        self._check_aux()
        self._check_rope()

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                     "head_dim", "vocab_size", "draft_vocab_size", "num_hidden_layers",
                     "target_hidden_size", "num_aux_hidden_states", "max_position_embeddings"):
            _require(name, _is_count(getattr(self, name)), getattr(self, name), "a whole number >= 1")
        for name in ("num_target_layers", "sliding_window"):
            value = getattr(self, name)
            _require(name, value is None or _is_count(value), value, "a whole number >= 1, or none")
        _require("num_attention_heads", self.num_attention_heads % self.num_key_value_heads == 0,
                 self.num_attention_heads, f"a multiple of num_key_value_heads {self.num_key_value_heads}")
        _require("head_dim", self.head_dim % 2 == 0, self.head_dim, "an even number, for rotary positions")
        _require("draft_vocab_size", self.draft_vocab_size <= self.vocab_size, self.draft_vocab_size,
                 f"at most vocab_size {self.vocab_size}")
        _require("rms_norm_eps", self.rms_norm_eps > 0, self.rms_norm_eps, "a number above 0")
        for name in ("has_fc", "fc_bias", "attention_bias", "attention_output_bias", "mlp_bias", "qk_norm"):
            _require(name, isinstance(getattr(self, name), bool), getattr(self, name), "true or false")

    def _check_aux(self) -> None:
        if self.aux_layer_ids is not None:
            ids, last = self.aux_layer_ids, self.num_target_layers
            _require("aux_layer_ids", len(ids) == self.num_aux_hidden_states, list(ids),
                     f"num_aux_hidden_states = {self.num_aux_hidden_states} ids")
            _require("aux_layer_ids", list(ids) == sorted(set(ids)), list(ids), "ascending ids, none twice")
            _require("aux_layer_ids", ids[0] >= 0 and (last is None or ids[-1] <= last), list(ids),
                     f"boundary ids from 0 to num_target_layers {last if last is not None else ''}".rstrip())
        if not self.has_fc:
            width = self.num_aux_hidden_states * self.target_hidden_size
            _require("has_fc", width == self.hidden_size, False,
                     f"true, since the aux states are {width} wide and hidden_size is {self.hidden_size}")
            _require("fc_bias", not self.fc_bias, True, "false when has_fc is false")

    def _check_rope(self) -> None:
        rope_type = self.rope_parameters.get("rope_type")
        _require("rope_parameters.rope_type", rope_type in ROPE_TYPES, rope_type, "one of " + ", ".join(ROPE_TYPES))
        theta = self.rope_parameters.get("rope_theta")
        _require("rope_parameters.rope_theta", isinstance(theta, int | float) and theta > 0, theta, "a number above 0")

    @property
    def aux_width(self) -> int:
        """Width of the concatenated aux states, A·T."""
        return self.num_aux_hidden_states * self.target_hidden_size

    @property
    def is_pruned(self) -> bool:
        """Whether the draft predicts a subset of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    def sees_embedding(self, layer: int) -> bool:
        """Whether layer `layer` takes [embedding, hidden] (2H) rather than hidden alone (H)."""
        return layer == 0 or self.layer_input == "every"

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready, in declaration order."""
        out = asdict(self)
        if self.aux_layer_ids is not None:
            out["aux_layer_ids"] = list(self.aux_layer_ids)
        return out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DraftConfig":
        """Inverse of `to_dict`.

        Raises:
            UserError: unknown key (with the nearest known one), missing key, or a bad value.
        """
        known = {f.name for f in fields(cls)}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise UserError(f"draft config: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        missing = [n for n in sorted(_REQUIRED) if n not in values]
        if missing:
            raise UserError(f"draft config: missing {', '.join(missing)}")
        return cls(**values)


_REQUIRED = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "vocab_size", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "rope_parameters"}


def default_aux_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """Boundary ids 2, n//2, n-3: the EAGLE reference's choice, shared by SGLang and vLLM.

    Raises:
        UserError: the target is too shallow for three distinct ids.
    """
    ids = (2, num_target_layers // 2, num_target_layers - 3)
    if not 2 < ids[1] < ids[2]:
        raise UserError(f"aux_layer_ids: a target of {num_target_layers} layers has no three default ids; "
                        f"give boundary ids between 0 and {num_target_layers}")
    return ids


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require(name: str, holds: bool, found: object, expected: str) -> None:
    if not holds:
        raise UserError(f"draft config: {name} is {found!r}, expected {expected}")
