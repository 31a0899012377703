"""What becomes of a step's metrics: the log, the trackers, the table on a terminal."""

import importlib.util
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import wandb
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eagle3_core import UserError
from eagle3_train import display
from eagle3_train.config import TrainConfig
from eagle3_train.display import StepTable
from eagle3_train.trackers import JsonlSink, check_trackers, flatten, open_sinks


def step_metrics(step: int, **changed: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 3.0 / step,
        "loss_per_step": [2.0, 4.0],
        "kl_per_step": [0.5, 1.0],
        "accuracy_per_step": [0.75, 0.5],
        "acceptance_per_position": [0.75, 0.25],
        "accept_length": 2.0,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "tokens_per_s": 1234.0,
        "data_wait_s": 0.25,
        "compute_s": 0.75,
        "rss_bytes": 3 * 2**29,
        "peak_bytes": 2**31,
    } | changed


class Collected:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def write(self, metrics: Any) -> None:
        self.steps.append(metrics["step"])

    def close(self) -> None:
        self.closed = True


def config(out: Path, *trackers: str) -> TrainConfig:
    values = {"output": str(out), "target": "t", "fit": {"trackers": list(trackers)}}
    return TrainConfig.model_validate(values)


def test_numbers_are_flattened_and_what_is_unknown_is_left_out() -> None:
    found = flatten({"loss": 1.5, "per": [1, 2], "eval": {"a": (3.0,), "b": None}, "s": "text"})
    assert found == {"loss": 1.5, "per/0": 1, "per/1": 2, "eval/a/0": 3.0}


def test_a_continued_log_holds_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for steps, start in (((1, 2, 3), 0), ((3, 4), 2)):
        sink = JsonlSink(path, start)
        for step in steps:
            sink.write(step_metrics(step, loss=float(start)))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 0), (2, 0), (3, 2), (4, 2)]


def test_sinks_are_closed_when_the_run_fails(tmp_path: Path) -> None:
    shown = Collected()
    with suppress(KeyError), open_sinks(config(tmp_path), 0, shown) as sinks:
        for sink in sinks:
            sink.write(step_metrics(1))
        raise KeyError
    assert shown.steps == [1]
    assert shown.closed
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_tensorboard_has_every_number_once_after_a_resume(tmp_path: Path) -> None:
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with open_sinks(config(tmp_path, "tensorboard"), start, Collected()) as sinks:
            for step in steps:
                for sink in sinks:
                    sink.write(step_metrics(step, loss=10.0 * start + step))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0),
    ]  # fmt: skip
    assert events.Scalars("acceptance_per_position/1")[0].value == 0.25


def test_wandb_offline_keeps_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with open_sinks(config(tmp_path, "wandb"), 0, Collected()) as sinks:
        for sink in sinks:
            sink.write(step_metrics(7))
        assert wandb.run is not None
        summary = dict(wandb.run.summary)
        assert wandb.run.config["fit"]["trackers"] == ["wandb"]
    assert wandb.run is None
    assert summary["step"] == 7
    assert summary["acceptance_per_position/1"] == 0.25
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 1


def test_a_missing_tracker_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'eagle3-train\[wandb\]'"):
        check_trackers(["wandb"])


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(display, "console", console)
    return console


def test_the_table_says_what_a_step_was(terminal: Console) -> None:
    table = StepTable("fit", 10)
    table.write(step_metrics(1))
    table.write(step_metrics(2, accept_length=3.0, eval={"accept_length": 1.25}))
    with terminal.capture() as capture:
        terminal.print(table.render())
    table.close()
    text = capture.get()
    for expected in (
        "fit 2/10", "75.0%", "25.0%", "accept length 2.500 (held out 1.250)",
        "1,234 tokens/s", "waiting for data 25%", "1.50 GiB, peak 2.00 GiB",
    ):  # fmt: skip
        assert expected in text


def test_without_a_terminal_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    table = StepTable("fit", 10)
    table.write(step_metrics(4, acceptance_per_position=None, accept_length=None))
    table.close()
    error = capsys.readouterr().err
    assert error.startswith("fit 4/10")
    assert "data wait 25%" in error
    assert len(error.splitlines()) == 1
