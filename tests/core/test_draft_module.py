"""What Eagle3Draft promises beside its arithmetic: ids, refusals, names, fresh weights, devices."""

import math
from typing import Any

import pytest
import torch

from eagle3_core import CacheContext, DraftConfig, Eagle3Draft


def make_config(**choices: Any) -> DraftConfig:
    plain: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 40,
        "draft_vocab_size": 24,
        "target_hidden_size": 16,
        "num_aux_hidden_states": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return DraftConfig(**(plain | choices))


def layer_names(layer: int, *extra: str) -> set[str]:
    parts = [
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        *extra,
    ]
    return {f"layers.{layer}.{part}.weight" for part in parts}


def test_names_of_the_plain_draft() -> None:
    """The names that every engine loads, so a checkpoint needs no renaming."""
    outer = {"embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight"}
    names = set(Eagle3Draft(make_config()).state_dict())
    assert names == outer | layer_names(0, "hidden_norm") | {"d2t", "t2d"}
    deep = make_config(num_hidden_layers=2, draft_vocab_size=40, aux_norm="concat_per_layer")
    names = set(Eagle3Draft(deep).state_dict())
    norms = {"input_norm.weight", *(f"fc_norm.{i}.weight" for i in range(3))}
    assert names == outer | norms | layer_names(0, "hidden_norm") | layer_names(1)


def test_shapes() -> None:
    config = make_config(
        num_hidden_layers=2, head_dim=6, target_hidden_size=12, layer_input="first", qk_norm=True
    )
    shapes = {name: tuple(value.shape) for name, value in Eagle3Draft(config).state_dict().items()}
    assert shapes["fc.weight"] == (16, 36)
    assert shapes["embed_tokens.weight"] == (40, 16)
    assert shapes["lm_head.weight"] == (24, 16)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (24, 32)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (12, 32)
    assert shapes["layers.1.self_attn.q_proj.weight"] == (24, 16)
    assert shapes["layers.1.self_attn.o_proj.weight"] == (16, 24)
    assert shapes["layers.1.self_attn.q_norm.weight"] == (6,)
    assert (shapes["d2t"], shapes["t2d"]) == ((24,), (40,))


def test_pruned_ids_are_offsets() -> None:
    draft = Eagle3Draft(make_config(draft_vocab_size=4))
    draft.d2t.copy_(torch.tensor([2, 2, 7, 36]))
    ids = torch.tensor([[3, 0], [1, 2]])
    assert draft.to_target_ids(ids).tolist() == [[39, 2], [3, 9]]
    whole = Eagle3Draft(make_config(draft_vocab_size=40))
    assert whole.to_target_ids(ids).tolist() == ids.tolist()
    assert not {"d2t", "t2d"} & set(whole.state_dict())


def test_wrong_widths_and_windows_are_refused() -> None:
    draft = Eagle3Draft(make_config(num_aux_hidden_states=3, sliding_window=2))
    with pytest.raises(ValueError, match="aux states are 32 wide, expected 3 x 16 = 48"):
        draft.project(torch.zeros(1, 1, 32))
    x = torch.zeros(1, 1, 16)
    with pytest.raises(ValueError, match="context has sliding_window None, the draft 2"):
        draft(x, x, torch.zeros(1, 1, dtype=torch.int64), CacheContext())


def test_fresh_weights() -> None:
    config = make_config(attention_bias=True, mlp_bias=True, aux_norm="per_layer", qk_norm=True)
    draft = Eagle3Draft(config)
    draft.init_weights(torch.Generator().manual_seed(0), std=0.5)
    for name, value in draft.named_parameters():
        if value.dim() == 1:
            constant = 0.0 if name.endswith("bias") else 1.0
            assert (value == constant).all(), name
    matrices = torch.cat([p.flatten() for p in draft.parameters() if p.dim() == 2])
    # The standard error of a standard deviation is std / sqrt(2 n): five of them.
    assert abs(matrices.std().item() - 0.5) < 5 * 0.5 / math.sqrt(2 * len(matrices))
    again = Eagle3Draft(config)
    again.init_weights(torch.Generator().manual_seed(0), std=0.5)
    assert torch.equal(draft.lm_head.weight, again.lm_head.weight)


def test_a_draft_built_without_memory_works_once_its_weights_are_assigned() -> None:
    config = make_config()
    draft = Eagle3Draft(config)
    draft.init_weights(torch.Generator().manual_seed(0))
    with torch.device("meta"):
        empty = Eagle3Draft(config)
    empty.load_state_dict(draft.state_dict(), assign=True)
    x = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(3)[None]
    with torch.no_grad():
        expected = draft(x, x, positions, CacheContext())
        assert torch.equal(empty(x, x, positions, CacheContext()), expected)


@pytest.mark.parametrize(
    "choices",
    [
        {"residual": "normed", "attention_bias": True},
        {"num_hidden_layers": 2, "qk_norm": True},
        {"num_hidden_layers": 2, "layer_input": "every"},
    ],
    ids=str,
)
def test_embeddings_multiplied_beforehand_change_nothing(choices: dict[str, Any]) -> None:
    draft = Eagle3Draft(make_config(**choices)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(generator=generator)
    e = draft.embed(torch.randint(40, (2, 5), generator=generator))
    x = torch.randn(2, 3, 16, generator=generator, dtype=torch.float64)
    slots = torch.tensor([0, 2, 3])
    positions = slots.expand(2, 3)
    want = draft(e[:, slots], x, positions, CacheContext())
    found = draft(draft.split_embeddings(e).at(slots), x, positions, CacheContext())
    # float64, one sum in another order
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
