"""Where the metrics of a step go: metrics.jsonl always, TensorBoard and wandb where asked for."""

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from eagle3_core import UserError
from eagle3_train.config import Tracker, TrainConfig


class Sink(Protocol):
    """Takes the metrics of every optimiser step, in order."""

    def write(self, metrics: Mapping[str, Any]) -> None:
        """One step; `metrics["step"]` counts from 1."""
        ...

    def close(self) -> None:
        """No more steps: the run has ended, or was interrupted."""
        ...


class JsonlSink:
    """metrics.jsonl: one line a step; lines after the step a run continues from are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        """`step`: the one the run continues from, 0 at its start."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if not path.exists() else path.read_text(encoding="utf-8").splitlines()[:step]
        work = path.with_name(f".{path.name}.tmp")  # a kill in between must not cost the rest
        work.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(work, path)

    def write(self, metrics: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def close(self) -> None:
        pass


class TensorBoardSink:
    """Event files for TensorBoard; steps after the one a run continues from are hidden there."""

    def __init__(self, folder: Path, step: int) -> None:
        """`step`: the one the run continues from, 0 at its start."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, metrics: Mapping[str, Any]) -> None:
        for name, value in flatten(metrics).items():
            self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A wandb run for each start of this run, grouped by its output folder.

    wandb's own environment decides where it goes (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY).
    """

    def __init__(self, config: TrainConfig) -> None:
        import wandb  # noqa: PLC0415 - an extra

        self._run = wandb.init(
            dir=str(config.out), group=config.out.name, config=config.model_dump()
        )
        self._run.define_metric("*", step_metric="step")  # a continued run does not start at 0

    def write(self, metrics: Mapping[str, Any]) -> None:
        self._run.log(flatten(metrics))

    def close(self) -> None:
        self._run.finish()


def check_trackers(trackers: Sequence[Tracker]) -> None:
    """Refuse a tracker whose package is missing, before any work.

    Raises:
        UserError: names the extra that brings it.
    """
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"fit.trackers: {name} is not installed; pip install 'eagle3-train[{name}]', "
                "or leave it out"
            )


@contextmanager
def open_sinks(config: TrainConfig, step: int, shown: Sink) -> Iterator[list[Sink]]:
    """The sinks of a run that continues after `step`; all are closed on leaving.

    Args:
        config: of the run.
        step: 0 at its start.
        shown: what a user watches, last to learn of a step.
    """
    with ExitStack() as stack:
        sinks: list[Sink] = [JsonlSink(config.out / "metrics.jsonl", step)]
        if "tensorboard" in config.fit.trackers:
            sinks.append(TensorBoardSink(config.out / "tensorboard", step))
        if "wandb" in config.fit.trackers:
            sinks.append(WandbSink(config))
        sinks.append(shown)
        for sink in sinks:
            stack.callback(sink.close)
        yield sinks


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers only, as trackers want them: `loss_per_step/0`, `eval/accept_length`."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            flat |= flatten({str(i): item for i, item in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[prefix + name] = value
    return flat
