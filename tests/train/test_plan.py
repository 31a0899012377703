"""Predictions against what is counted: parameters, multiplications, bytes of a real store."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle3_core import CacheContext, Eagle3Draft
from eagle3_core.target import Target, outline_target
from eagle3_train.build import draft_config
from eagle3_train.cli import main
from eagle3_train.config import StrategyName, TrainConfig
from eagle3_train.plan import Text, plan
from eagle3_train.store import FeatureStore

TOKENS = 24
TEXT = Text(tokens=TOKENS, supervised_fraction=0.0, mean_length=0.0)


def config(**sections: Any) -> TrainConfig:
    values = {"output": "out", "target": "t", "capture": {"aux_layer_ids": [1, 2, 4]}}
    return TrainConfig.model_validate(values | sections)


def products(counter: FlopCounterMode) -> int:
    """Of weights, without attention."""
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


def test_multiplications_are_those_of_the_models(target: Target) -> None:
    run = config(draft={"num_hidden_layers": 2, "vocab_size": 64}, fit={"ttt_length": 1})
    found = plan(run, target, TEXT, device="h100")["flops"]
    ids = torch.arange(TOKENS)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        target.model.get_decoder()(input_ids=ids)
    assert found["capture"] == products(counter)

    draft = Eagle3Draft(draft_config(run.draft, target, (1, 2, 4), 64))
    aux = torch.zeros(1, TOKENS, draft.config.aux_width)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        draft(draft.embed(ids), draft.project(aux), ids, CacheContext())
    assert found["fit"] == 3 * products(counter)  # forward, and both factors' gradients


def test_more_epochs_steps_and_supervision_take_longer(target: Target) -> None:
    def fit(supervised: float = 0.5, **section: Any) -> float:
        text = Text(1000, supervised, 50.0)
        return plan(config(fit=section), target, text, device="h100")["flops"]["fit"]

    assert fit(epochs=3) == pytest.approx(3 * fit())
    assert fit(ttt_length=6) > fit(ttt_length=5)
    assert fit(train_head=False) < fit()
    assert fit(supervised=0.6) > fit()


def test_parameters_are_those_that_train(target: Target) -> None:
    run = config(draft={"vocab_size": 64}, fit={"train_head": False})
    found = plan(run, target, TEXT, device="h100")
    draft = Eagle3Draft(draft_config(run.draft, target, (1, 2, 4), 64))
    sizes = {name: p.numel() for name, p in draft.named_parameters()}
    assert found["draft_parameters"] == sum(sizes.values())
    frozen = sizes["embed_tokens.weight"] + sizes["lm_head.weight"]
    assert found["trained_parameters"] == sum(sizes.values()) - frozen
    assert found["target_parameters"] == sum(p.numel() for p in target.model.parameters())


def test_strategies_share_what_they_shard(target: Target) -> None:
    found = {
        strategy: plan(config(), target, TEXT, num_processes=4, strategy=strategy, device="h100")[
            "memory_bytes"
        ]
        for strategy in get_args(StrategyName)
    }
    whole = found["ddp"]
    for strategy in ("fsdp2", "zero2", "zero3"):
        sharded = found[strategy]
        assert sharded["optimiser"] == whole["optimiser"] / 4
        assert sharded["gradients"] == whole["gradients"]  # at the peak of a step
        assert sharded["weights"] == whole["weights"] + whole["gradients"] / 4
    assert whole["optimiser"] == 2 * whole["gradients"]


def test_hours_go_down_with_processes(target: Target) -> None:
    hours = plan(config(), target, TEXT, num_processes=3, device="a100")["hours"]
    assert [row["num_processes"] for row in hours] == [1, 2, 3, 4, 8]
    assert hours[2]["fit"] == pytest.approx(hours[0]["fit"] / 3)


def test_a_target_without_weights_is_enough_and_the_disk_is_what_capture_fills(
    write_run: Callable[[Path], Path],
    target_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_run(tmp_path)
    assert main(["capture", str(path)]) == 0
    bare = tmp_path / "bare"
    shutil.copytree(target_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert main(["plan", str(path), f"target={bare}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(tmp_path.rglob("*")) == before

    store = FeatureStore(tmp_path / "out/features/train")
    assert found["tokens"] == sum(store.lengths)
    masks = sum(int(store[i].loss_mask.sum()) for i in range(len(store)))
    assert found["supervised_fraction"] == pytest.approx(masks / sum(store.lengths))
    held = sum(t.nbytes for i in range(len(store)) for t in vars(store[i]).values())
    assert found["disk_bytes"]["features"] == held + store.head().nbytes
    assert found["flops_per_s"] > 0

    arguments = ["plan", str(path), "data.train=[]", "--tokens", "5000", "--device", "h200"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "5,000 tokens, 50% supervised" in table
    assert "capture, hours" in table


def test_an_outline_has_every_shape_and_no_weight(target_folder: Path, target: Target) -> None:
    outline = outline_target(target_folder)
    assert outline.lm_head.shape == target.lm_head.shape
    assert {p.device.type for p in outline.model.parameters()} == {"meta"}
    assert (outline.num_layers, outline.vocab_size) == (target.num_layers, target.vocab_size)
