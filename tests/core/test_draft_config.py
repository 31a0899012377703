"""Every rule of DraftConfig: refused by field, found and expected, in one line."""

import copy
import json
import pickle
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from eagle3_core import DraftConfig, UserError, default_aux_layer_ids

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
MINIMAL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "draft_vocab_size": 128,
    "target_hidden_size": 48,
    "num_aux_hidden_states": 3,
    "rope_parameters": ROPE,
}
SIZES = [
    *(name for name in MINIMAL if name != "rope_parameters"),
    "num_hidden_layers",
    "max_position_embeddings",
]
COUNT = "a whole number >= 1"
POSITIVE = "a number above 0"


def make(**changes: Any) -> DraftConfig:
    return DraftConfig(**(MINIMAL | changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(UserError) as error:
        make(**changes)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_the_minimal_config_is_the_plain_eagle3_draft() -> None:
    config = make()
    assert (config.num_hidden_layers, config.layer_input) == (1, "first")
    assert (config.aux_norm, config.residual, config.feedback) == ("none", "raw", "pre_norm")
    assert config.has_fc
    assert not config.qk_norm
    assert config.aux_width == 3 * 48


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", None, [8]], ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_whole_numbers(name: str, value: Any) -> None:
    assert refusal(**{name: value}) == f"draft config: {name} is {value!r}, expected {COUNT}"


@pytest.mark.parametrize("value", [0, -4, 1.5, True, "4"], ids=repr)
@pytest.mark.parametrize("name", ["sliding_window", "num_target_layers"])
def test_optional_sizes(name: str, value: Any) -> None:
    expected = f"draft config: {name} is {value!r}, expected {COUNT}, or none"
    assert refusal(**{name: value}) == expected
    assert getattr(make(**{name: 4}), name) == 4


@pytest.mark.parametrize("value", [0, 1, None, "true"], ids=repr)
@pytest.mark.parametrize(
    "name",
    ["has_fc", "fc_bias", "attention_bias", "attention_output_bias", "mlp_bias", "qk_norm"],
)
def test_flags_are_booleans(name: str, value: Any) -> None:
    assert refusal(**{name: value}) == f"draft config: {name} is {value!r}, expected true or false"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layer_input", ["first", "every"]),
        ("aux_norm", ["none", "per_layer", "concat", "concat_per_layer"]),
        ("residual", ["raw", "normed"]),
        ("feedback", ["pre_norm", "post_norm"]),
    ],
)
def test_choices(name: str, options: list[str]) -> None:
    for option in options:
        assert getattr(make(**{name: option}), name) == option
    for value in ("last", None, True, ["first"]):
        expected = f"draft config: {name} is {value!r}, expected one of {', '.join(options)}"
        assert refusal(**{name: value}) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads is 4, expected a multiple of num_key_value_heads 3",
        ),
        ({"head_dim": 15}, "head_dim is 15, expected an even number, for rotary positions"),
        ({"draft_vocab_size": 321}, "draft_vocab_size is 321, expected at most vocab_size 320"),
        ({"rms_norm_eps": 0.0}, f"rms_norm_eps is 0.0, expected {POSITIVE}"),
        ({"rms_norm_eps": "1e-5"}, f"rms_norm_eps is '1e-5', expected {POSITIVE}"),
        ({"rms_norm_eps": float("nan")}, f"rms_norm_eps is nan, expected {POSITIVE}"),
        (
            {"has_fc": False},
            "has_fc is False, expected true, since the aux states are 144 wide and hidden_size "
            "is 64",
        ),
        (
            {
                "has_fc": False,
                "fc_bias": True,
                "target_hidden_size": 64,
                "num_aux_hidden_states": 1,
            },
            "fc_bias is True, expected false when has_fc is false",
        ),
    ],
)
def test_contradictions(changes: dict[str, Any], expected: str) -> None:
    assert refusal(**changes) == f"draft config: {expected}"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2], "num_aux_hidden_states = 3 ids"),
        ([], "num_aux_hidden_states = 3 ids"),
        ([5, 2, 9], "ascending ids, none twice"),
        ([2, 2, 9], "ascending ids, none twice"),
        ([2, 5, 13], "boundary ids from 0 to num_target_layers 12"),
        ([-1, 5, 9], "a list of whole numbers >= 0"),
        ([2, 5, 9.0], "a list of whole numbers >= 0"),
        ([False, 5, 9], "a list of whole numbers >= 0"),
        (["2", "5", "9"], "a list of whole numbers >= 0"),
        ("2,5,9", "a list of whole numbers >= 0"),
        (7, "a list of whole numbers >= 0"),
    ],
    ids=repr,
)
def test_aux_layer_ids(ids: Any, expected: str) -> None:
    message = refusal(aux_layer_ids=ids, num_target_layers=12)
    assert message.startswith("draft config: aux_layer_ids is ")
    assert message.endswith(f"expected {expected}")


def test_aux_layer_ids_run_from_the_embeddings_to_the_last_state() -> None:
    config = make(aux_layer_ids=[0, 5, 12], num_target_layers=12)
    assert config.aux_layer_ids == (0, 5, 12)
    # Without num_target_layers there is no upper bound to check against.
    assert make(aux_layer_ids=(3, 5, 99)).aux_layer_ids == (3, 5, 99)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, "rope_parameters is None, expected a mapping"),
        ([], "rope_parameters is [], expected a mapping"),
        ({"rope_theta": 1e4}, "rope_parameters.rope_type is None, expected one of default, "),
        (ROPE | {"rope_type": "mrope"}, "rope_parameters.rope_type is 'mrope', expected one of"),
        ({"rope_type": "default"}, f"rope_parameters.rope_theta is None, expected {POSITIVE}"),
        (ROPE | {"rope_theta": "1e4"}, f"rope_parameters.rope_theta is '1e4', expected {POSITIVE}"),
        (ROPE | {"rope_theta": True}, f"rope_parameters.rope_theta is True, expected {POSITIVE}"),
        (ROPE | {"rope_theta": 0}, f"rope_parameters.rope_theta is 0, expected {POSITIVE}"),
        (
            ROPE | {"rope_type": "linear"},
            f"rope_parameters.factor is None, expected {POSITIVE}",
        ),
        (
            ROPE | {"rope_type": "dynamic", "factor": -1},
            f"rope_parameters.factor is -1, expected {POSITIVE}",
        ),
        (
            YARN | {"beta_fast": "32"},
            "rope_parameters.beta_fast is '32', expected a number above 0",
        ),
        (YARN | {"truncate": 1}, "rope_parameters.truncate is 1, expected true or false"),
        (
            {key: value for key, value in LLAMA3.items() if key != "high_freq_factor"},
            f"rope_parameters.high_freq_factor is None, expected {POSITIVE}",
        ),
        (
            # transformers rotates the whole head whatever this says
            ROPE | {"partial_rotary_factor": 0.5},
            "rope_parameters has the key 'partial_rotary_factor' (0.5), which rope_type 'default' "
            "does not take",
        ),
        (
            LLAMA3 | {"low_freq_fctor": 2.0},
            "rope_parameters has the key 'low_freq_fctor' (2.0), which rope_type 'llama3' does not "
            "take; did you mean 'low_freq_factor'?",
        ),
    ],
)
def test_rope(rope: Any, expected: str) -> None:
    assert refusal(rope_parameters=rope).startswith(f"draft config: {expected}")


@pytest.mark.parametrize(
    "rope",
    [ROPE, YARN | {"attention_factor": None, "mscale": 1.0, "truncate": False}, LLAMA3],
)
def test_round_trip(rope: dict[str, Any]) -> None:
    config = make(
        rope_parameters=rope,
        aux_layer_ids=[2, 6, 9],
        num_target_layers=12,
        layer_input="every",
        num_hidden_layers=2,
        aux_norm="concat",
        residual="normed",
        feedback="post_norm",
        sliding_window=512,
    )
    values = json.loads(json.dumps(config.to_dict()))
    assert DraftConfig.from_dict(values) == config
    assert values["aux_layer_ids"] == [2, 6, 9]
    assert DraftConfig.from_dict(make().to_dict()) == make()


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("hiden_size", "; did you mean 'hidden_size'?"),
        ("num_aux_hidden_state", "; did you mean 'num_aux_hidden_states'?"),
        ("zzz", ""),
    ],
)
def test_unknown_keys_are_refused(key: str, near: str) -> None:
    with pytest.raises(
        UserError, match=re.escape(f"draft config: unknown key {key!r}{near}") + "$"
    ):
        DraftConfig.from_dict(MINIMAL | {key: 1})


def test_missing_keys_are_listed() -> None:
    values = {k: v for k, v in MINIMAL.items() if k not in ("head_dim", "rope_parameters")}
    with pytest.raises(UserError, match=r"draft config: missing head_dim, rope_parameters$"):
        DraftConfig.from_dict(values)


def test_frozen_and_apart_from_its_sources() -> None:
    rope, ids = dict(ROPE), [2, 6, 9]
    config = make(rope_parameters=rope, aux_layer_ids=ids)
    rope["rope_theta"], ids[0] = 1.0, 0
    config.to_dict()["rope_parameters"]["rope_theta"] = 2.0
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.aux_layer_ids == (2, 6, 9)
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_which_layers_see_the_embedding() -> None:
    first = make(num_hidden_layers=3)
    every = make(num_hidden_layers=3, layer_input="every")
    assert [first.sees_embedding(i) for i in range(3)] == [True, False, False]
    assert [every.sees_embedding(i) for i in range(3)] == [True, True, True]


def test_pruned_means_fewer_ids_than_the_target() -> None:
    assert make().is_pruned
    assert not make(draft_vocab_size=320).is_pruned


@pytest.mark.parametrize(
    ("layers", "ids"), [(32, (2, 16, 29)), (36, (2, 18, 33)), (30, (2, 15, 27)), (7, (2, 3, 4))]
)
def test_default_aux_layer_ids(layers: int, ids: tuple[int, ...]) -> None:
    assert default_aux_layer_ids(layers) == ids


@pytest.mark.parametrize("layers", range(1, 7))
def test_shallow_targets_have_no_default_ids(layers: int) -> None:
    message = f"aux_layer_ids: a target of {layers} layers has no three default ids"
    with pytest.raises(UserError, match=message):
        default_aux_layer_ids(layers)
