"""From a producer's config and tensor headers to a `DraftConfig`, each value with its source."""

from typing import Any

from eagle3_core.checkpoint.aux_ids import find_id_lists, resolve_aux_layer_ids
from eagle3_core.checkpoint.lookup import Lookup
from eagle3_core.checkpoint.names import count_layers, settle_plain_norms
from eagle3_core.checkpoint.rope_keys import resolve_rope
from eagle3_core.config import DraftConfig
from eagle3_core.errors import UserError

# Keys whose other values would change the function in ways no draft here computes.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "logit_scale": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
}
_NO_AUX = "eagle_config.use_aux_hidden_state"
_AUX_NORMS = {
    (False, False): "none",
    (True, False): "per_layer",
    (False, True): "concat",
    (True, True): "concat_per_layer",
}


def resolve(look: Lookup) -> tuple[DraftConfig, dict[str, str]]:
    """-> (config, canonical name -> name in the files).

    Raises:
        UserError: a contradiction, a missing value, or something no draft here computes.
    """
    _refuse_unsupported(look)
    if look.key("tie_word_embeddings") and "lm_head.weight" in look.names:
        look.report.warn(
            "tie_word_embeddings is true, but the file has its own lm_head: that one is used "
            "(SGLang would use the embeddings)"
        )
    values = _sizes(look)
    values |= _aux(look, values["hidden_size"], values["num_target_layers"])
    values |= {
        "layer_input": _layer_input(look, values["num_hidden_layers"], values["hidden_size"]),
        "aux_norm": _aux_norm(look),
        "residual": look.flag(
            "residual", ("norm_before_residual",), when_true="normed", when_false="raw"
        ),
        "feedback": look.flag(
            "feedback",
            ("norm_output", "eagle_config.return_hidden_post_norm"),
            when_true="post_norm",
            when_false="pre_norm",
        ),
        "qk_norm": _qk_norm(look),
        "sliding_window": _sliding_window(look),
        "attention_bias": _bias(
            look, "attention_bias", "layers.0.self_attn.q_proj.bias", "attention_bias"
        ),
        "attention_output_bias": _bias(
            look, "attention_output_bias", "layers.0.self_attn.o_proj.bias", None
        ),
        "mlp_bias": _bias(look, "mlp_bias", "layers.0.mlp.gate_proj.bias", "mlp_bias"),
        "fc_bias": _bias(look, "fc_bias", "fc.bias", "bias"),
        "rms_norm_eps": look.pick("rms_norm_eps"),
        "max_position_embeddings": look.pick("max_position_embeddings"),
        "rope_parameters": _rope(look),
    }
    try:
        config = DraftConfig(**values)
    except UserError as error:
        raise UserError(f"{look.where}: {error}") from None
    plain = [i for i in range(config.num_hidden_layers) if not config.sees_embedding(i)]
    return config, settle_plain_norms(look.files, look.names, plain, look.report)


def _refuse_unsupported(look: Lookup) -> None:
    for key, neutral in _NEUTRAL.items():
        value = look.key(key)
        if value is not None and value not in neutral:
            raise UserError(
                f"{look.where}: {key} is {value!r}, which this draft does not compute; "
                f"expected {' or '.join(map(repr, neutral)) or 'none'}"
            )
    # A published head has the section with an empty quant_algo and plain weights.
    quantised = look.key("quantization_config") or {}
    if quantised.get("quant_algo", quantised.get("quant_method")):
        raise UserError(
            f"{look.where}: quantization_config says {quantised!r}; quantised drafts are not "
            "supported, use the unquantised one"
        )


# Sizes


def _sizes(look: Lookup) -> dict[str, Any]:
    layers = _num_hidden_layers(look)
    hidden = look.size("hidden_size", ("norm.weight", 0))
    heads = look.size("num_attention_heads")
    head_dim = _head_dim(look, heads, hidden)
    keys = look.info("layers.0.self_attn.k_proj.weight")
    fits = keys.shape[0] // head_dim if keys and keys.shape[0] % head_dim == 0 else None
    vocab = _vocab_size(look)
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": look.size("intermediate_size", ("layers.0.mlp.gate_proj.weight", 0)),
        "num_attention_heads": heads,
        "num_key_value_heads": look.settle("num_key_value_heads", fits, keys, default=heads),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "draft_vocab_size": look.size(
            "draft_vocab_size", ("lm_head.weight", 0), ("d2t", 0), default=vocab
        ),
        "num_target_layers": _num_target_layers(look),
    }


def _num_hidden_layers(look: Lookup) -> int:
    counted = count_layers(look.names)
    if counted == 0:
        raise UserError(f"{look.files.folder}: no layer among its tensors")
    claimed = look.key("num_hidden_layers")
    if claimed is None or claimed == counted or look.told("num_hidden_layers"):
        return look.decide("num_hidden_layers", counted, "tensor shape", "layers in the file")
    if counted == 1 and any("midlayer." in name for name in look.names.values()):
        # EAGLE, SpecForge and AngelSlim build one midlayer whatever the config says.
        look.report.warn(
            f"num_hidden_layers is {claimed}, but the file holds one midlayer: 1 is used"
        )
        return look.decide("num_hidden_layers", 1, "tensor shape", "one midlayer in the file")
    held = "layers.0" if counted == 1 else f"layers.0 to layers.{counted - 1}"
    raise UserError(
        f"{look.where}: num_hidden_layers is {claimed}, but the file holds {counted} ({held}); "
        "tensors are missing or left over"
    )


def _head_dim(look: Lookup, heads: int, hidden: int) -> int:
    output = look.info("layers.0.self_attn.o_proj.weight")
    if output is None:
        return look.settle("head_dim", None, None, default=hidden // heads)
    if output.shape[-1] % heads:
        raise UserError(
            f"{output.file}: {output.name} has shape {list(output.shape)}, expected a multiple "
            f"of num_attention_heads {heads} columns"
        )
    return look.settle("head_dim", output.shape[-1] // heads, output)


def _vocab_size(look: Lookup) -> int:
    default = look.lender.vocab_size if look.lender else None
    return look.size("vocab_size", ("embed_tokens.weight", 0), ("t2d", 0), default=default)


def _num_target_layers(look: Lookup) -> int | None:
    claimed, lender = look.key("num_target_layers"), look.lender
    if claimed is not None:
        if lender and claimed != lender.num_layers:
            raise UserError(
                f"{look.where}: num_target_layers is {claimed}, but target {lender.name} has "
                f"{lender.num_layers} layers"
            )
        return look.decide("num_target_layers", claimed, "config key", "num_target_layers")
    if lender:
        return look.decide("num_target_layers", lender.num_layers, "target", lender.name)
    return look.decide("num_target_layers", None, "producer default", "not in the config")


# Aux states


def _aux(look: Lookup, hidden: int, num_target_layers: int | None) -> dict[str, Any]:
    width = look.size("target_hidden_size", default=hidden)
    if look.key(_NO_AUX) is False and "fc.weight" not in look.names:
        look.decide("aux_source", "final_norm", "config key", f"{_NO_AUX} is false, and no fc")
        return {
            "target_hidden_size": width,
            "num_aux_hidden_states": 1,
            "aux_source": "final_norm",
            "has_fc": False,
        }
    count = _num_aux(look, width)
    return {
        "target_hidden_size": width,
        "num_aux_hidden_states": count,
        "aux_layer_ids": _aux_layer_ids(look, count, num_target_layers),
    }


def _num_aux(look: Lookup, width: int) -> int:
    claims: dict[str, int] = {
        key: look.key(key)
        for key in ("num_aux_hidden_states", "num_aux_layers")
        if look.key(key) is not None
    }
    if look.told("aux_layer_ids"):
        claims["aux_layer_ids"] = len(look.overrides["aux_layer_ids"])
    else:
        claims |= {key.name: len(ids) for key, ids in find_id_lists(look.keys, look.where)}
    fc = look.info("fc.weight")
    if fc:
        if fc.shape[-1] % width:
            expected = next(iter(claims.values()), 3)
            raise UserError(
                f"{fc.file}: {fc.name} has {fc.shape[-1]} columns, expected {expected} x "
                f"target_hidden_size {width} = {expected * width}"
            )
        claims[f"{fc.name}, {fc.shape[-1]} columns / {width}"] = fc.shape[-1] // width
    first, count = next(iter(claims.items()), ("EAGLE-3's three states", 3))
    if look.told("num_aux_hidden_states"):
        return look.decide("num_aux_hidden_states", count, "caller", "num_aux_hidden_states")
    for other, value in claims.items():
        if value != count:
            raise UserError(
                f"{look.where}: {first} means {count} aux states, but {other} means {value}"
            )
    source = "tensor shape" if fc and len(claims) == 1 else "config key"
    return look.decide("num_aux_hidden_states", count, source, "; ".join(claims) or first)


def _aux_layer_ids(
    look: Lookup, count: int, num_target_layers: int | None
) -> tuple[int, ...] | None:
    if look.told("aux_layer_ids"):
        return look.decide("aux_layer_ids", None, "caller", "boundary ids")
    ids, source, why, warnings = resolve_aux_layer_ids(
        look.keys,
        look.where,
        num_aux=count,
        num_target_layers=num_target_layers,
        target_type=look.lender.model_type if look.lender else None,
        convention=look.overrides.get("aux_layer_id_convention"),
        has_default=look.dialect.has_default_ids,
    )
    look.report.warnings.extend(warnings)
    return look.decide("aux_layer_ids", ids, source, why)


def _aux_norm(look: Lookup) -> str:
    per_layer = [k for k in ("fc_norm", "use_aux_norm") if look.key(k) is not None]
    # The nested key goes first in SGLang and vLLM; the top-level one counts in its absence.
    whole = ("eagle_config.norm_before_fc", "norm_before_fc")
    concat = [k for k in whole if look.key(k) is not None][:1]
    mode = _AUX_NORMS[any(look.key(k) for k in per_layer), any(look.key(k) for k in concat)]
    if per_layer or concat:
        return look.decide("aux_norm", mode, "config key", ", ".join(per_layer + concat))
    return look.decide("aux_norm", mode, "producer default", "no norm key in the config")


# The layers


def _layer_input(look: Lookup, layers: int, hidden: int) -> str:
    widths: dict[int, str] = {}
    for layer in range(1, layers):
        info = look.info(f"layers.{layer}.self_attn.q_proj.weight")
        if info:
            widths.setdefault(info.shape[-1], info.name)
    if widths.keys() <= {hidden}:
        why = f"later layers take {hidden} columns" if widths else "one layer, one design"
        return look.decide("layer_input", "first", "tensor shape", why)
    if widths.keys() == {2 * hidden}:
        why = f"every layer takes {2 * hidden} columns"
        return look.decide("layer_input", "every", "tensor shape", why)
    found = ", ".join(f"{name} takes {width}" for width, name in widths.items())
    raise UserError(
        f"{look.files.folder}: {found} columns, expected {hidden} in all layers after the "
        f"first, or {2 * hidden} in all"
    )


def _qk_norm(look: Lookup) -> bool:
    if "qk_norm" in look.forced:
        return look.pick("qk_norm")
    body = look.key("model_type")
    return look.decide("qk_norm", body == "qwen3", "config key", f"model_type {body!r}")


def _sliding_window(look: Lookup) -> int | None:
    """Qwen3 bodies alone window their attention, in the layers that layer_types names."""
    kinds = look.key("layer_types")
    if look.key("model_type") != "qwen3" or not isinstance(kinds, list):
        return look.decide("sliding_window", None, "producer default", "full attention")
    sliding = {kind == "sliding_attention" for kind in kinds}
    if sliding == {True, False} and not look.told("sliding_window"):
        raise UserError(
            f"{look.where}: layer_types mixes {', '.join(sorted(set(kinds)))}, expected one "
            "kind of attention in all layers"
        )
    window = look.key("sliding_window") if sliding == {True} else None
    return look.decide("sliding_window", window, "config key", "layer_types")


def _bias(look: Lookup, name: str, tensor: str, key: str | None) -> bool:
    """Presence is the file's business; a flag without its tensor means that values are lost."""
    claimed, why = look.forced.get(key, (look.key(key), key)) if key else (None, "")
    info = look.info(tensor)
    if info is None:
        if claimed and not look.told(name):
            raise UserError(
                f"{look.where}: {key} is true, but the file has no {tensor}: its values are lost"
            )
        return look.decide(name, False, "tensor shape", f"no {tensor}; {why}".rstrip("; "))
    if key and not claimed:
        look.report.warn(f"{info.name} is in the file although {key} is not true: it is used")
    return look.decide(name, True, "tensor shape", info.name)


def _rope(look: Lookup) -> dict[str, Any]:
    if look.told("rope_parameters"):
        return look.decide("rope_parameters", None, "caller", "rope_parameters")
    theta, source, why = None, "config key", ""
    if look.told("rope_theta"):
        theta, source, why = look.overrides["rope_theta"], "caller", "rope_theta"
    elif "rope_theta" in look.forced:
        theta, why = look.forced["rope_theta"]
        source = "producer default"
    default = look.dialect.defaults.get("rope_theta", 10000.0)
    rope, found, warnings = resolve_rope(look.keys, look.where, theta, default)
    look.report.warnings.extend(warnings)
    if not why:
        source, why = ("config key", found) if found else ("producer default", "no rope key")
    return look.decide("rope_parameters", rope, source, why)
