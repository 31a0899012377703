"""Producers' layouts written by hand: what is read from where, and what is refused by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from eagle3_core import Eagle3Draft, UserError, load_draft
from eagle3_core.checkpoint import LoadedDraft

MakeDraft = Callable[..., Eagle3Draft]
MakeTarget = Callable[..., LlamaForCausalLM]
Folder = Callable[..., Path]
Config = dict[str, Any]
Midlayer = Callable[[Eagle3Draft], dict[str, Tensor]]


def _why(loaded: LoadedDraft, name: str) -> tuple[Any, str, str]:
    found = [d for d in loaded.report.decisions if d.name == name]
    assert len(found) == 1, name
    return found[0].value, found[0].source, found[0].why


def _same_weights(loaded: LoadedDraft, draft: Eagle3Draft) -> bool:
    mine, theirs = loaded.draft.state_dict(), draft.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], t) for n, t in theirs.items())


def _without(tensors: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if n not in names}


# Aux ids: sglang #25454; vllm #43671, #50170

NESTED, TOP = "eagle_config", "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("keys", "boundary"),
    [
        ({}, (2, 4, 5)),
        ({TOP: [2, 4, 5]}, (2, 4, 5)),
        ({NESTED: {TOP: [1, 3, 4]}}, (2, 4, 5)),
        ({TOP: [2, 4, 5], NESTED: {TOP: [1, 3, 4]}}, (2, 4, 5)),
        ({NESTED: {TOP: [3, 5, 8]}}, (3, 5, 8)),
        ({TOP: None, NESTED: {TOP: None}}, (2, 4, 5)),
        ({TOP: [0, 4, 8]}, (0, 4, 8)),
        ({"aux_hidden_states_layer_ids": [1, 3, 4]}, (2, 4, 5)),
        ({TOP: [2, 4, 5], NESTED: {TOP: [2, 4, 5]}}, f"{TOP}.*{NESTED}.{TOP}"),
        ({TOP: [5, 2, 4]}, "not ascending"),
        ({NESTED: {"layer_ids": [1, 3, 4]}}, "aux_layer_id_convention=boundary"),
        ({TOP: [2, 4]}, f"{TOP} means 2 aux states, but fc.weight"),
        ({TOP: [2, 4, 9]}, "aux_layer_ids is .*9.*, expected boundary ids from 0 to .* 8"),
        ({TOP: "2,4,5"}, "expected a list of layer ids"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states means 4 aux states, but"),
    ],
)
def test_aux_layer_ids(
    keys: Config,
    boundary: tuple[int, ...] | str,
    make_draft: MakeDraft,
    make_target: MakeTarget,
    folder: Folder,
    specforge_config: Config,
    midlayer: Midlayer,
) -> None:
    path = folder({**specforge_config, **keys}, midlayer(make_draft()))
    if isinstance(boundary, str):
        with pytest.raises(UserError, match=boundary):
            load_draft(path, target=make_target())
        return
    loaded = load_draft(path, target=make_target())
    assert loaded.config.aux_layer_ids == boundary
    ids, source, why = _why(loaded, "aux_layer_ids")
    assert ids == boundary
    named = any(k in why for k in (TOP, "aux_hidden_states_layer_ids"))
    assert (source == "config key" and named) or (source == "producer default" and "n//2" in why)


def test_ids_as_the_caller_says(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    path = folder({**specforge_config, TOP: [1, 3, 4]}, midlayer(make_draft()))
    loaded = load_draft(path, overrides={"aux_layer_id_convention": "output"})
    assert loaded.config.aux_layer_ids == (2, 4, 5)
    loaded = load_draft(path, overrides={"aux_layer_ids": [3, 4, 6]})
    assert loaded.config.aux_layer_ids == (3, 4, 6)
    assert _why(loaded, "aux_layer_ids")[1] == "caller"


# Sizes: SafeAILab/EAGLE #315, #223; pytorch/executorch PR 20149


@pytest.mark.parametrize("head_dim", [8, None, 6])
def test_head_dim_is_what_o_proj_says(
    head_dim: int | None,
    make_draft: MakeDraft,
    folder: Folder,
    specforge_config: Config,
    midlayer: Midlayer,
) -> None:
    draft = make_draft(head_dim=8)
    path = folder({**specforge_config, "head_dim": head_dim}, midlayer(draft))
    if head_dim == 6:
        with pytest.raises(UserError, match=r"head_dim is 6, .*\[16, 32\], which fits head_dim 8"):
            load_draft(path)
        return
    loaded = load_draft(path)
    assert loaded.config.head_dim == 8
    assert _why(loaded, "head_dim")[1] == ("tensor shape" if head_dim is None else "config key")


def test_everything_that_tensors_show_may_be_absent(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    kept = {"architectures", "model_type", "num_attention_heads"}
    config = {k: v for k, v in specforge_config.items() if k in kept}
    draft = make_draft(rms_norm_eps=1e-6, aux_layer_ids=None, num_target_layers=None)
    loaded = load_draft(folder(config, midlayer(draft)))
    assert loaded.config == draft.config
    assert _why(loaded, "draft_vocab_size")[1] == "tensor shape"
    assert _why(loaded, "rms_norm_eps")[1] == "producer default"


def test_missing_heads_is_an_error(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    del specforge_config["num_attention_heads"]
    path = folder(specforge_config, midlayer(make_draft()))
    specforge_config["num_attention_heads"] = 4
    with pytest.raises(UserError, match="num_attention_heads is missing"):
        load_draft(path)


def test_no_map_is_needed_for_a_full_vocabulary(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    draft = make_draft(draft_vocab_size=40)
    config = {**specforge_config, "draft_vocab_size": 40}
    assert _same_weights(load_draft(folder(config, midlayer(draft))), draft)
    trivial = {"d2t": torch.zeros(40, dtype=torch.int64), "t2d": torch.ones(40, dtype=torch.bool)}
    loaded = load_draft(folder(config, midlayer(draft) | trivial, "trivial"))
    assert _same_weights(loaded, draft)


@pytest.mark.parametrize("how", ["absent", "zero"])
def test_unset_map_is_refused_unless_vouched_for(
    how: str, make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    tensors = _without(midlayer(make_draft()), "d2t", "t2d")
    if how == "zero":
        tensors["d2t"] = torch.zeros(12, dtype=torch.int64)
    path = folder(specforge_config, tensors)
    with pytest.raises(UserError, match="d2t=identity"):
        load_draft(path)
    loaded = load_draft(path, overrides={"d2t": "identity"})
    assert torch.equal(loaded.draft.to_target_ids(torch.arange(12)), torch.arange(12))
    assert _why(loaded, "d2t")[:2] == ("identity", "caller")


# Accounting: vllm #43132, #54526; sglang #36528, #21272


def test_left_over_and_unfilled_tensors_are_all_named(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    good = midlayer(make_draft())
    variants = {
        "q_norm": (good | {"midlayer.self_attn.q_norm.weight": torch.ones(4)}, "unused: midlayer"),
        "hidden": (_without(good, "midlayer.hidden_norm.weight"), "unfilled: midlayer.hidden_norm"),
        "fc_norm": (good | {"fc_norm.0.weight": torch.ones(16)}, r"unused: fc_norm\.0\.weight"),
        "twice": (good | make_draft().state_dict(), "layers.0.hidden_norm.weight and midlayer.h"),
    }
    for name, (tensors, message) in variants.items():
        with pytest.raises(UserError, match=message) as caught:
            load_draft(folder(specforge_config, tensors, name))
        assert "\n" not in str(caught.value)
    assert _same_weights(load_draft(folder(specforge_config, good, "good")), make_draft())


def test_a_target_is_no_draft(make_target: MakeTarget, tmp_path: Path) -> None:
    make_target().save_pretrained(tmp_path / "target")
    with pytest.raises(UserError, match="a target model, not a draft"):
        load_draft(tmp_path / "target")


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("held", [True, False])
def test_fc_bias_is_in_the_file_or_not(
    flag: bool | None,
    held: bool,
    make_draft: MakeDraft,
    folder: Folder,
    specforge_config: Config,
    midlayer: Midlayer,
) -> None:
    draft = make_draft(fc_bias=held)
    path = folder({**specforge_config, "bias": flag}, midlayer(draft))
    if flag and not held:
        with pytest.raises(UserError, match=r"bias is true, but the file has no fc\.bias"):
            load_draft(path)
        return
    loaded = load_draft(path)
    assert loaded.config.fc_bias is held
    assert _same_weights(loaded, draft)
    assert bool(loaded.report.warnings) is (held and not flag)


# Borrowing


def test_embeddings_come_from_the_target(
    make_draft: MakeDraft,
    make_target: MakeTarget,
    folder: Folder,
    specforge_config: Config,
    midlayer: Midlayer,
    tmp_path: Path,
) -> None:
    path = folder(specforge_config, _without(midlayer(make_draft()), "embed_tokens.weight"))
    with pytest.raises(UserError, match="give the target"):
        load_draft(path)
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    for lender in (target, tmp_path / "target", str(tmp_path / "target")):
        loaded = load_draft(path, target=lender)
        lent = target.get_input_embeddings().weight
        assert torch.equal(loaded.draft.embed_tokens.weight, lent)
        assert loaded.draft.embed_tokens.weight.data_ptr() != lent.data_ptr()
        assert _why(loaded, "embed_tokens.weight")[:2] == ("borrowed", "target")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 48}, "vocab_size is 40, but target .* has 48"),
        ({"hidden_size": 32}, "target_hidden_size is 16, but target .* has 32"),
        ({"num_hidden_layers": 3}, "no three default ids"),
    ],
)
def test_another_targets_draft(
    change: Config,
    message: str,
    make_draft: MakeDraft,
    make_target: MakeTarget,
    folder: Folder,
    specforge_config: Config,
    midlayer: Midlayer,
) -> None:
    path = folder(specforge_config, midlayer(make_draft()))
    with pytest.raises(UserError, match=message):
        load_draft(path, target=make_target(**change))


# Producers


def test_modelopt_export(
    make_draft: MakeDraft, make_target: MakeTarget, folder: Folder, specforge_config: Config
) -> None:
    draft = make_draft(num_hidden_layers=2)
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    config = {
        **specforge_config,
        "num_hidden_layers": 2,
        "rope_scaling": yarn,
        "eagle_config": {TOP: [1, 3, 4], "use_last_layernorm": True, "use_aux_hidden_state": True},
    }
    tensors = _without(draft.state_dict(), "embed_tokens.weight", "t2d")
    loaded = load_draft(folder(config, tensors), target=make_target())
    assert loaded.report.dialect == "modelopt"
    assert loaded.config.rope_parameters == {**yarn, "rope_theta": 10000.0}
    assert loaded.config.aux_layer_ids == (2, 4, 5)
    assert torch.equal(loaded.draft.t2d, draft.t2d)
    said = " ".join(loaded.report.warnings)
    assert "PR 689" in said
    assert "PR 1238" in said


def test_modelopt_head_without_lm_head(
    make_draft: MakeDraft, make_target: MakeTarget, folder: Folder, specforge_config: Config
) -> None:
    config = {
        **specforge_config,
        "draft_vocab_size": None,
        "eagle_config": {"use_last_layernorm": True},
    }
    tensors = make_draft(draft_vocab_size=40).state_dict()
    path = folder(config, _without(tensors, "embed_tokens.weight", "lm_head.weight"))
    loaded = load_draft(path, target=make_target())
    assert torch.equal(loaded.draft.lm_head.weight, make_target().lm_head.weight)
    assert "vllm #50170" in " ".join(loaded.report.warnings)


def test_megatron_deep_names(
    make_draft: MakeDraft, make_target: MakeTarget, folder: Folder, specforge_config: Config
) -> None:
    draft = make_draft(num_hidden_layers=2, draft_vocab_size=40)
    tensors = {n.replace("layers.", "midlayer."): t for n, t in draft.state_dict().items()}
    tensors["midlayer.1.hidden_norm.weight"] = tensors.pop("midlayer.1.input_layernorm.weight")
    config = {
        **specforge_config,
        "architectures": ["LlamaForCausalLMEagle3Deep"],
        "num_hidden_layers": 2,
        "draft_vocab_size": 40,
    }
    loaded = load_draft(folder(config, tensors), target=make_target())
    assert (loaded.report.dialect, loaded.config.layer_input) == ("modelopt", "first")
    assert _same_weights(loaded, draft)


def test_two_norms_that_differ_have_no_single_meaning(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config
) -> None:
    tensors = make_draft(num_hidden_layers=2).state_dict()
    tensors["layers.1.hidden_norm.weight"] = torch.ones(16)
    with pytest.raises(UserError, match="no single meaning"):
        load_draft(folder({**specforge_config, "num_hidden_layers": 2}, tensors))


@pytest.mark.parametrize(
    ("rope", "theta", "warned"),
    [
        ({"rope_theta": 1e6}, 10000.0, True),
        ({"rope_theta": 1e6, "rope_scaling": None}, 10000.0, True),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 10000.0, True),
        ({"rope_theta": 10000}, 10000.0, False),
        (
            {
                "rope_theta": 1e6,
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_interleaved": True,
                    "mrope_section": [1, 1],
                },
            },
            1e6,
            True,
        ),
    ],
)
def test_angelslim_trains_with_theta_10000(
    rope: Config,
    theta: float,
    warned: bool,
    make_draft: MakeDraft,
    folder: Folder,
    specforge_config: Config,
    midlayer: Midlayer,
) -> None:
    config = {k: v for k, v in specforge_config.items() if k != "rope_theta"} | {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "aux_hidden_states_layer_ids": [1, 3, 4],
        "tie_word_embeddings": True,
        "num_hidden_layers": 24,
        **rope,
    }
    path = folder(config, midlayer(make_draft()))
    loaded = load_draft(path)
    assert loaded.report.dialect == "angelslim"
    assert loaded.config.rope_parameters == {"rope_type": "default", "rope_theta": theta}
    assert loaded.config.aux_layer_ids == (2, 4, 5)
    assert any("rope" in w for w in loaded.report.warnings) is warned
    declared = load_draft(path, overrides={"rope_theta": 1e6})
    assert declared.config.rope_parameters["rope_theta"] == 1e6


def test_tie_flag_that_lies_is_told(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    config = {**specforge_config, "tie_word_embeddings": True}
    loaded = load_draft(folder(config, midlayer(make_draft())))
    assert any("tie_word_embeddings" in w for w in loaded.report.warnings)


def test_nemo(make_draft: MakeDraft, folder: Folder, specforge_config: Config) -> None:
    draft = make_draft(aux_norm="per_layer", feedback="post_norm")
    own = ("lm_head.weight", "d2t", "t2d")
    tensors = {n if n in own else f"model.{n}": t for n, t in draft.state_dict().items()}
    config = {
        **specforge_config,
        "architectures": ["LlamaEagle3DraftModel"],
        "num_aux_hidden_states": 3,
        "fc_norm": True,
        "norm_output": True,
    }
    loaded = load_draft(folder(config, tensors))
    assert loaded.report.dialect == "nemo"
    assert (loaded.config.aux_norm, loaded.config.feedback) == ("per_layer", "post_norm")
    assert _same_weights(loaded, draft)


def test_deepspec(
    make_draft: MakeDraft, make_target: MakeTarget, folder: Folder, specforge_config: Config
) -> None:
    draft = make_draft(
        num_hidden_layers=2,
        layer_input="every",
        qk_norm=True,
        draft_vocab_size=40,
        num_aux_hidden_states=5,
        aux_layer_ids=(2, 3, 4, 5, 7),
    )
    config = {
        **specforge_config,
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "target_layer_ids": [1, 2, 3, 4, 6],
        "num_target_layers": 8,
    }
    del config["draft_vocab_size"]
    loaded = load_draft(folder(config, draft.state_dict()), target=make_target())
    assert loaded.report.dialect == "deepspec"
    assert loaded.config == draft.config
    assert _same_weights(loaded, draft)


def test_torchspec_warns_of_pruned_rows(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config
) -> None:
    config = {**specforge_config, "_torchspec_version": "0.1"}
    loaded = load_draft(folder(config, make_draft().state_dict()))
    assert loaded.report.dialect == "torchspec"
    assert any("prune-vocab" in w for w in loaded.report.warnings)


@pytest.mark.parametrize("flag", ["use_aux_norm", "fc_norm"])
def test_sglang_legacy_norm_names(
    flag: str, make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    draft = make_draft(aux_norm="per_layer")
    tensors = midlayer(draft)
    for i, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
    loaded = load_draft(folder({**specforge_config, flag: True}, tensors))
    assert loaded.config.aux_norm == "per_layer"
    assert _same_weights(loaded, draft)


def test_gpt_oss_drafters(
    make_draft: MakeDraft,
    make_target: MakeTarget,
    folder: Folder,
    specforge_config: Config,
    midlayer: Midlayer,
) -> None:
    """Nested norm_before_fc and boundary ids up to n (sglang #32334)."""
    draft = make_draft(aux_norm="concat", aux_layer_ids=(4, 6, 8))
    config = {**specforge_config, "eagle_config": {"norm_before_fc": True, TOP: [4, 6, 8]}}
    loaded = load_draft(folder(config, midlayer(draft)), target=make_target())
    assert (loaded.config.aux_norm, loaded.config.aux_layer_ids) == ("concat", (4, 6, 8))
    assert _same_weights(loaded, draft)


def test_no_aux_head(make_draft: MakeDraft, folder: Folder, specforge_config: Config) -> None:
    """The state that feeds the lm_head, without fc (vllm #27688)."""
    draft = make_draft(
        num_aux_hidden_states=1, aux_layer_ids=None, aux_source="final_norm", has_fc=False
    )
    config = {**specforge_config, "eagle_config": {"use_aux_hidden_state": False}}
    loaded = load_draft(folder(config, draft.state_dict()))
    assert (loaded.config.aux_source, loaded.config.has_fc) == ("final_norm", False)
    assert _same_weights(loaded, draft)


@pytest.mark.parametrize("rope", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}])
def test_speculators_diff_config(
    rope: Config, make_draft: MakeDraft, folder: Folder, specforge_config: Config
) -> None:
    draft = make_draft(qk_norm=True, sliding_window=None)
    body = {k: specforge_config[k] for k in ("hidden_size", "intermediate_size", "head_dim")} | {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
        **rope,
    }
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 12,
        "target_hidden_size": None,
        "transformer_layer_config": body,
    }
    loaded = load_draft(folder(config, draft.state_dict()))
    assert _same_weights(loaded, draft)
    assert loaded.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert (loaded.config.rms_norm_eps, loaded.config.max_position_embeddings) == (1e-6, 32768)
    assert loaded.config.residual == "raw"
    assert any("norm_before_residual is absent" in w for w in loaded.report.warnings)


@pytest.mark.parametrize(("value", "feedback"), [(True, "post_norm"), (False, "pre_norm")])
def test_specforge_norm_output_is_told(
    value: bool,
    feedback: str,
    make_draft: MakeDraft,
    folder: Folder,
    specforge_config: Config,
    midlayer: Midlayer,
) -> None:
    path = folder({**specforge_config, "norm_output": value}, midlayer(make_draft()))
    loaded = load_draft(path)
    assert loaded.config.feedback == feedback
    assert any("PR 879" in w for w in loaded.report.warnings)
    told = load_draft(path, overrides={"feedback": "pre_norm"})
    assert _why(told, "feedback")[:2] == ("pre_norm", "caller")


def test_contradicting_ropes(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    config = {**specforge_config, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    path = folder(config, midlayer(make_draft()))
    with pytest.raises(UserError, match=r"rope_parameters\.rope_theta is 500000\.0 and rope_theta"):
        load_draft(path)
    assert load_draft(path, overrides={"rope_theta": 5e5}).config.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({}, {"mask_hidden": (1, 1, 48)}, "P-EAGLE"),
        ({"architectures": ["PEagleDraftModel"]}, {}, "P-EAGLE"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, "latent attention"),
        ({}, {"midlayer.self_attn.kv_a_proj_with_mqa.weight": (4, 32)}, "latent attention"),
        ({}, {"midlayer.enorm.weight": (16,)}, "eh_proj"),
        ({}, {"layers.0.pre_feedforward_layernorm.weight": (16,)}, "Gemma4"),
        ({"quantization_config": {"quant_algo": "FP8"}}, {}, "quantised"),
        ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'"),
        ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, {}, "rope_type is 'longrope'"),
        ({"norm_output": "yes"}, {}, "norm_output is 'yes', expected true or false"),
        ({"hidden_size": "16"}, {}, "hidden_size is '16', expected a whole number"),
        ({"vocab_size": 48}, {}, r"vocab_size is 48, but embed_tokens\.weight"),
        ({"draft_vocab_size": 16}, {}, r"draft_vocab_size is 16, but lm_head\.weight"),
    ],
)
def test_other_things_are_refused_by_name(
    keys: Config,
    tensors: dict[str, tuple[int, ...]],
    message: str,
    make_draft: MakeDraft,
    folder: Folder,
    specforge_config: Config,
    midlayer: Midlayer,
) -> None:
    extra = {name: torch.ones(shape) for name, shape in tensors.items()}
    with pytest.raises(UserError, match=message) as caught:
        load_draft(folder({**specforge_config, **keys}, midlayer(make_draft()) | extra))
    assert "\n" not in str(caught.value)


def test_empty_quantisation_section_is_none(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    """A published ModelOpt head has the section without an algorithm."""
    config = {**specforge_config, "quantization_config": {"quant_algo": None, "quant_method": "x"}}
    assert _same_weights(load_draft(folder(config, midlayer(make_draft()))), make_draft())


def test_mixed_dtypes_are_widened_and_told(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    tensors = midlayer(make_draft())
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    loaded = load_draft(folder(specforge_config, tensors))
    assert loaded.draft.lm_head.weight.dtype == torch.float32
    assert any("bfloat16" in w for w in loaded.report.warnings)


def test_rotary_buffers_are_ignored_by_name(
    make_draft: MakeDraft, folder: Folder, specforge_config: Config, midlayer: Midlayer
) -> None:
    name = "midlayer.self_attn.rotary_emb.inv_freq"
    path = folder(specforge_config, midlayer(make_draft()) | {name: torch.ones(2)})
    assert any(name in line for line in load_draft(path).report.ignored)


def test_quantised_tensors_are_refused(
    make_draft: MakeDraft,
    tmp_path: Path,
    folder: Folder,
    specforge_config: Config,
    midlayer: Midlayer,
) -> None:
    tensors = {n: t.detach().clone() for n, t in midlayer(make_draft()).items()}
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    path = folder(specforge_config, {"fc.weight": torch.ones(1)})
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(UserError, match=r"fc\.weight has dtype torch\.float8_e4m3fn"):
        load_draft(path)
