"""Every strategy, on one process and on two, makes the same run, and takes up any other's.

Two launches train all combinations of a tiny draft; the tests compare what they left.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_core import UserError
from eagle3_train.config import FitConfig
from eagle3_train.launch import launch
from eagle3_train.strategies import check_strategy

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).with_name("strategy_worker.py")
STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
STEPS = 4
FIT = {"max_steps": STEPS, "save_every": 2, "keep": 9, "clip_norm": 0.05}
# Steps of one sample: of two processes one has nothing. The head's and the embeddings' own groups.
LONELY = {**FIT, "batch_tokens": 1, "train_embeddings": True, "train_head": False}
LONELY |= {"gradient_checkpointing": True, "ttt_ramp": {"start": 1, "share": 0.5}}


def plan(folder: Path, own: bool) -> Path:
    rows: list[list[Any]] = []
    for i, name in enumerate(STRATEGIES):
        rows.append([name, name, FIT, None])
        source = name if own else f"from-{STRATEGIES[i - 1]}"
        rows.append([f"{name}-continued", name, FIT, source])
        if name == "ddp" or not own:
            rows.append([f"{name}-lonely", name, LONELY, None])
        rows.append([f"{name}-bf16", name, {**FIT, "dtype": "bfloat16"}, None])
    for name in ("ddp", "fsdp2"):
        rows.append([f"{name}-muon", name, {**FIT, "optimizer": "muon"}, None])
        if own:
            fit = {**FIT, "optimizer": "muon"}
            rows.append([f"{name}-muon-continued", name, fit, f"{name}-muon"])
    path = folder / "plan.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of the runs on one process and on two."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    assert launch([sys.executable, str(WORKER), str(plan(one, own=True))], 1) == 0
    for name in STRATEGIES:
        shutil.copytree(one / name, two / f"from-{name}")
    path = plan(two, own=False)
    for name, _, _, source in json.loads(path.read_text()):
        if source is not None and source.startswith("from-"):
            shutil.copytree(two / source / "checkpoints/step-2", two / name / "checkpoints/step-2")
            shutil.copy(two / source / "metrics.jsonl", two / name)
    assert launch([sys.executable, str(WORKER), str(path)], 2) == 0
    return {1: one, 2: two}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state(folder: Path) -> dict[str, Tensor]:
    """Weights of OUT/draft, and the moments of the last checkpoint."""
    last = folder / f"checkpoints/step-{STEPS}"
    return load_file(folder / "draft/model.safetensors") | load_file(last / "optimizer.safetensors")


def assert_near(found: Path, expected: Path, weights: float, loss: float, norm: float) -> None:
    a, b = metrics(expected), metrics(found)
    assert len(a) == len(b) == STEPS
    for x, y in zip(a, b, strict=True):
        assert y["loss"] == pytest.approx(x["loss"], rel=loss)
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=norm)
        assert (y["tokens"], y["num_rounds"]) == (x["tokens"], x["num_rounds"])
    first, second = state(expected), state(found)
    assert first.keys() == second.keys()
    for name, value in first.items():
        if "/" not in name or name.startswith("step/"):
            torch.testing.assert_close(second[name], value, rtol=0, atol=weights, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("world", "kind"), [(1, ""), (2, ""), (2, "-lonely")])
def test_the_run_is_the_same(runs: dict[int, Path], world: int, strategy: str, kind: str) -> None:
    assert metrics(runs[1] / "ddp")[0]["grad_norm"] > FIT["clip_norm"]  # so clipping is compared
    # Float32 sums in another order: 1e-7 of the gradient, which four steps of 1e-4 at most carry
    # into the weights where a second moment is near zero.
    found, expected = runs[world] / (strategy + kind), runs[1] / ("ddp" + kind)
    assert_near(found, expected, weights=1e-6, loss=1e-6, norm=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2])
def test_bfloat16_passes_move_float32_weights(
    runs: dict[int, Path], world: int, strategy: str
) -> None:
    # Of bf16's 8 bits: products summed in another order, and norms that FSDP2 gathers as bf16,
    # turn the sign of a few small gradients, and AdamW moves those by the whole rate (3 x 1e-4).
    found, expected = runs[world] / f"{strategy}-bf16", runs[1] / "ddp-bf16"
    assert_near(found, expected, weights=4e-4, loss=1e-4, norm=5e-3)
    assert all(t.dtype == torch.float32 for t in state(found).values() if t.is_floating_point())
    moved = load_file(found / "draft/model.safetensors")["fc.weight"]
    assert not torch.equal(moved, moved.bfloat16().float())
    assert metrics(found)[0]["loss"] != metrics(runs[1] / "ddp")[0]["loss"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("world", [1, 2])
def test_muon_is_the_same(runs: dict[int, Path], world: int, strategy: str) -> None:
    # Muon's own iteration is bf16; over shards it sums in another order.
    found, expected = runs[world] / f"{strategy}-muon", runs[1] / "ddp-muon"
    assert_near(found, expected, weights=1e-5, loss=1e-5, norm=1e-4)
    moments = {k.split("/")[0] for k in state(found) if k.endswith("/fc.weight")}
    assert moments == {"momentum_buffer"}
    moments = {k.split("/")[0] for k in state(found) if k.endswith("/lm_head.weight")}
    assert moments == {"exp_avg", "exp_avg_sq", "step"}
    assert metrics(found)[-1]["loss"] != metrics(runs[1] / "ddp")[-1]["loss"]


@pytest.mark.parametrize("run", [*STRATEGIES, "ddp-muon", "fsdp2-muon"])
def test_a_continued_run_is_bit_identical(runs: dict[int, Path], run: str) -> None:
    whole, continued = state(runs[1] / run), state(runs[1] / f"{run}-continued")
    assert whole.keys() == continued.keys()
    for name, value in whole.items():
        assert torch.equal(continued[name], value), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_of_another_strategy_is_continued_by_two(
    runs: dict[int, Path], strategy: str
) -> None:
    found, expected = runs[2] / f"{strategy}-continued", runs[1] / "ddp"
    assert_near(found, expected, weights=1e-6, loss=1e-6, norm=1e-5)


def test_muon_under_zero_is_refused() -> None:
    for name in ("zero2", "zero3"):
        with pytest.raises(UserError, match="use --strategy ddp or fsdp2"):
            check_strategy(name, FitConfig(optimizer="muon"))
