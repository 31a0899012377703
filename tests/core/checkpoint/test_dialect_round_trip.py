"""read(write(x)) == x for every consumer's layout and every config that it can carry."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core import DraftConfig, Eagle3Draft, UserError, load_draft
from eagle3_core.checkpoint import DESTINATIONS, export_draft
from eagle3_core.checkpoint.consumers import CONSUMERS

MakeDraft = Callable[..., Eagle3Draft]

ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 32.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32.0,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
IDS = {1: ((0,), (8,)), 2: ((3, 8),), 3: ((2, 4, 5), (0, 4, 8), None), 5: ((1, 2, 4, 6, 8),)}


@st.composite
def configs(draw: st.DrawFn) -> DraftConfig:
    layers = draw(st.integers(1, 3))
    aux = draw(st.sampled_from(sorted(IDS)))
    width = draw(st.sampled_from([16, 24]))
    final = aux == 1 and draw(st.booleans())
    return DraftConfig(
        hidden_size=width if final else 16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([4, 8])),
        vocab_size=40,
        draft_vocab_size=draw(st.sampled_from([12, 40])),
        num_hidden_layers=layers,
        target_hidden_size=width,
        num_target_layers=draw(st.sampled_from([8, None])),
        num_aux_hidden_states=aux,
        aux_layer_ids=None if final else draw(st.sampled_from(IDS[aux])),
        aux_source="final_norm" if final else "boundaries",
        has_fc=not final,
        fc_bias=not final and draw(st.booleans()),
        # With one layer the two designs are one, and a file cannot tell them apart.
        layer_input=draw(st.sampled_from(["first", "every"])) if layers > 1 else "first",
        aux_norm=draw(st.sampled_from(["none", "per_layer", "concat", "concat_per_layer"])),
        residual=draw(st.sampled_from(["raw", "normed"])),
        feedback=draw(st.sampled_from(["pre_norm", "post_norm"])),
        attention_bias=draw(st.booleans()),
        attention_output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, 5])),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6, 1e-3])),
        max_position_embeddings=draw(st.sampled_from([512, 4096])),
        rope_parameters=draw(st.sampled_from(ROPES)),
    )


def _draft(config: DraftConfig, make_draft: MakeDraft) -> Eagle3Draft:
    return make_draft(**{k: getattr(config, k) for k in config.to_dict()})


@settings(max_examples=40, deadline=None)
@given(config=configs())
@pytest.mark.parametrize("to", DESTINATIONS)
def test_read_is_the_inverse_of_write(to: str, config: DraftConfig, make_draft: MakeDraft) -> None:
    config = _carried(config, to)
    draft = _draft(config, make_draft)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        export_draft(draft, path, to)
        loaded = load_draft(path)
    expected = config.to_dict()
    if expected["aux_layer_ids"] is None and loaded.config.aux_layer_ids is not None:
        # Without ids a reader takes the common default, which is what such a file means.
        expected["aux_layer_ids"] = [2, 4, 5]
    assert loaded.config.to_dict() == expected
    tensors = loaded.draft.state_dict()
    assert tensors.keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensors[name], tensor), name


# What to fall back to where a consumer refuses; fields of one row hang together.
SIMPLE: tuple[dict[str, Any], ...] = (
    {
        "hidden_size": 16,
        "target_hidden_size": 16,
        "num_target_layers": 8,
        "num_aux_hidden_states": 3,
        "aux_layer_ids": (2, 4, 5),
        "aux_source": "boundaries",
        "has_fc": True,
    },
    {"num_hidden_layers": 1, "layer_input": "first"},
    {"fc_bias": False},
    {"aux_norm": "none"},
    {"residual": "raw"},
    {"feedback": "pre_norm"},
    {"qk_norm": False},
    {"attention_bias": False, "attention_output_bias": False, "mlp_bias": False},
    {"sliding_window": None},
    {"head_dim": 4},
    {"rope_parameters": ROPES[0]},
)


def _carried(config: DraftConfig, to: str) -> DraftConfig:
    """Take away what `to` refuses and nothing else, so that every example tests something."""
    if to not in CONSUMERS:
        return config
    for simple in SIMPLE:
        refusals = CONSUMERS[to].refusals(config)
        simpler = replace(config, **simple)
        if len(CONSUMERS[to].refusals(simpler)) < len(refusals):
            config = simpler
    assert CONSUMERS[to].refusals(config) == []
    return config


REFUSED = {
    "specforge": ({"num_hidden_layers": 2}, {"feedback": "post_norm"}, {"aux_norm": "concat"}),
    "sglang": (
        {"residual": "normed"},
        {"qk_norm": True},
        {"attention_bias": True, "attention_output_bias": True},
        {"num_hidden_layers": 2, "layer_input": "every"},
        {"aux_layer_ids": (0, 4, 5)},
        {"num_aux_hidden_states": 1, "aux_layer_ids": (4,)},
    ),
    "vllm": (
        {"fc_bias": True},
        {"attention_bias": True},
        {"sliding_window": 4},
        {"num_hidden_layers": 2, "layer_input": "every"},
    ),
    "speculators": ({"target_hidden_size": 24}, {"fc_bias": True}),
    "eagle": ({"head_dim": 8}, {"aux_layer_ids": (1, 4, 5)}, {"rope_parameters": ROPES[4]}),
    "trtllm": ({"aux_norm": "concat_per_layer"}, {"residual": "normed"}, {"qk_norm": True}),
}


@pytest.mark.parametrize(
    ("to", "changes"), [(to, changes) for to, rows in REFUSED.items() for changes in rows]
)
def test_what_a_consumer_cannot_honour_is_refused(
    to: str, changes: dict[str, Any], make_draft: MakeDraft, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"{to} cannot hold this draft: "):
        export_draft(make_draft(**changes), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_fc_bias_goes_where_it_is_read(make_draft: MakeDraft, tmp_path: Path) -> None:
    export_draft(make_draft(fc_bias=True), tmp_path / "out", "sglang")
    assert load_draft(tmp_path / "out").config.fc_bias


@pytest.mark.parametrize("to", ["sglang", "vllm"])
def test_plain_later_layers_are_written_for_both_engines(
    to: str, make_draft: MakeDraft, tmp_path: Path
) -> None:
    draft = make_draft(num_hidden_layers=2)
    export_draft(draft, tmp_path / "out", to)
    loaded = load_draft(tmp_path / "out")
    names = {d.name: d.why for d in loaded.report.decisions}
    assert "layers.1.hidden_norm.weight equals" in names["layers.1 input norm"]


def test_unknown_destination(make_draft: MakeDraft, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--to is 'sglan', expected one of canonical"):
        export_draft(make_draft(), tmp_path / "out", "sglan")
