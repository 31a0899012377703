"""Every semantic choice of an EAGLE-3 draft, stated once, validated once."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, get_args

from eagle3_core.errors import UserError

LayerInput = Literal["first", "every"]
AuxNorm = Literal["none", "per_layer", "concat", "concat_per_layer"]
Residual = Literal["raw", "normed"]
Feedback = Literal["pre_norm", "post_norm"]
AuxSource = Literal["boundaries", "final_norm"]

# Per rope type, the keys that transformers' tables need beside rope_theta and those they may have.
# Any other key would be ignored there (mrope_section, partial_rotary_factor of the default type).
_ROPE_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset(
            {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        ),
    ),
    "llama3": (
        frozenset(
            {
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            }
        ),
        frozenset(),
    ),
}
ROPE_TYPES = tuple(_ROPE_KEYS)

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "num_hidden_layers",
    "target_hidden_size",
    "num_aux_hidden_states",
    "max_position_embeddings",
)
_OPTIONAL_SIZES = ("num_target_layers", "sliding_window")
_FLAGS = (
    "has_fc",
    "fc_bias",
    "attention_bias",
    "attention_output_bias",
    "mlp_bias",
    "qk_norm",
)
_CHOICES = {
    "layer_input": LayerInput,
    "aux_norm": AuxNorm,
    "residual": Residual,
    "feedback": Feedback,
    "aux_source": AuxSource,
}


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
    aux_source: AuxSource = (
        "boundaries"  # final_norm: the one state that feeds the target's lm_head
    )
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
        if isinstance(self.rope_parameters, Mapping):
            object.__setattr__(self, "rope_parameters", dict(self.rope_parameters))
        if isinstance(self.aux_layer_ids, list):
            object.__setattr__(self, "aux_layer_ids", tuple(self.aux_layer_ids))
        for name in _SIZES:
            self._require(name, _is_count(getattr(self, name)), "a whole number >= 1")
        for name in _OPTIONAL_SIZES:
            value = getattr(self, name)
            self._require(name, value is None or _is_count(value), "a whole number >= 1, or none")
        for name in _FLAGS:
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        for name, choices in _CHOICES.items():
            options = get_args(choices)
            self._require(name, getattr(self, name) in options, "one of " + ", ".join(options))
        self._check_sizes()
        self._check_aux_layer_ids()
        self._check_aux_source()
        self._check_fc()
        _check_rope(self.rope_parameters)

    def _require(self, name: str, holds: bool, expected: str) -> None:
        _require(name, holds, getattr(self, name), expected)

    def _check_sizes(self) -> None:
        self._require(
            "num_attention_heads",
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"a multiple of num_key_value_heads {self.num_key_value_heads}",
        )
        self._require("head_dim", self.head_dim % 2 == 0, "an even number, for rotary positions")
        self._require(
            "draft_vocab_size",
            self.draft_vocab_size <= self.vocab_size,
            f"at most vocab_size {self.vocab_size}",
        )
        self._require("rms_norm_eps", _is_positive(self.rms_norm_eps), "a number above 0")

    def _check_aux_layer_ids(self) -> None:
        ids, last = self.aux_layer_ids, self.num_target_layers
        if ids is None:
            return
        whole = isinstance(ids, tuple) and all(_is_count(i, least=0) for i in ids)
        upper = "" if last is None else f" to num_target_layers {last}"
        self._require("aux_layer_ids", whole, "a list of whole numbers >= 0")
        self._require(
            "aux_layer_ids",
            len(ids) == self.num_aux_hidden_states,
            f"num_aux_hidden_states = {self.num_aux_hidden_states} ids",
        )
        self._require("aux_layer_ids", ids == tuple(sorted(set(ids))), "ascending ids, none twice")
        self._require(
            "aux_layer_ids", last is None or ids[-1] <= last, f"boundary ids from 0{upper}"
        )

    def _check_aux_source(self) -> None:
        if self.aux_source == "final_norm":
            single = self.num_aux_hidden_states == 1 and self.aux_layer_ids is None
            self._require(
                "aux_source",
                single,
                "boundaries, unless there is one aux state and no aux_layer_ids",
            )

    def _check_fc(self) -> None:
        if self.has_fc:
            return
        self._require(
            "has_fc",
            self.aux_width == self.hidden_size,
            f"true, since the aux states are {self.aux_width} wide and hidden_size is "
            f"{self.hidden_size}",
        )
        self._require("fc_bias", not self.fc_bias, "false when has_fc is false")

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
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise UserError(f"draft config: unknown key {key!r}{_near(str(key), known)}")
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise UserError(f"draft config: missing {', '.join(missing)}")
        return cls(**values)


def default_aux_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """Boundary ids 2, n//2, n-3: the EAGLE reference's choice, shared by SGLang and vLLM.

    Raises:
        UserError: the target is too shallow for three distinct ids.
    """
    ids = (2, num_target_layers // 2, num_target_layers - 3)
    if not 2 < ids[1] < ids[2]:
        raise UserError(
            f"aux_layer_ids: a target of {num_target_layers} layers has no three default ids; "
            f"give boundary ids between 0 and {num_target_layers}"
        )
    return ids


def _check_rope(rope: object) -> None:
    if not isinstance(rope, Mapping):
        raise UserError(f"draft config: rope_parameters is {rope!r}, expected a mapping")
    rope_type = rope.get("rope_type")
    _require(
        "rope_parameters.rope_type",
        rope_type in ROPE_TYPES,
        rope_type,
        "one of " + ", ".join(ROPE_TYPES),
    )
    required, optional = _ROPE_KEYS[str(rope_type)]
    known = {"rope_type", "rope_theta"} | required | optional
    for key, value in rope.items():
        if key not in known:
            raise UserError(
                f"draft config: rope_parameters has the key {key!r} ({value!r}), which rope_type "
                f"{rope_type!r} does not take{_near(str(key), known)}"
            )
    for key in ("rope_theta", *sorted(required)):
        name, value = f"rope_parameters.{key}", rope.get(key)
        _require(name, _is_positive(value), value, "a number above 0")
    for key in sorted(optional & rope.keys()):
        name, value = f"rope_parameters.{key}", rope[key]
        if key == "truncate":
            _require(name, isinstance(value, bool), value, "true or false")
        else:
            _require(name, value is None or _is_positive(value), value, "a number above 0, or none")


def _near(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(name: str, holds: bool, found: object, expected: str) -> None:
    if not holds:
        raise UserError(f"draft config: {name} is {found!r}, expected {expected}")
