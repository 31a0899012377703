"""The training loop: the same optimiser steps on any number of processes."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3_core import Eagle3Draft, UserError, save_draft
from eagle3_core.fingerprint import fingerprint, tokenizer_fingerprint
from eagle3_train.config import StrategyName, TrainConfig
from eagle3_train.display import StepTable, console
from eagle3_train.distill import Distillation, normaliser
from eagle3_train.evaluate import Samples, evaluate
from eagle3_train.interrupts import interrupts
from eagle3_train.metrics import StepCounts, memory, reset_peak_memory
from eagle3_train.order import epoch_batches, pack, share
from eagle3_train.prefetch import ahead
from eagle3_train.processes import Processes
from eagle3_train.resume import (
    Progress,
    discard_run,
    incomplete,
    newest_checkpoint,
    save_checkpoint,
    sync,
)
from eagle3_train.schedule import learning_rate_factor, unroll_length
from eagle3_train.store import RollingStore
from eagle3_train.strategies import make_strategy
from eagle3_train.trackers import Sink, open_sinks
from eagle3_train.ttt import Batch, supervised_slots


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    progress: Progress
    interrupted: bool
    metrics: dict[str, Any]  # of the last step


class Trainer:
    """One run of `fit`; `run` trains from the newest checkpoint to the end."""

    def __init__(
        self,
        config: TrainConfig,
        draft: Eagle3Draft,
        train: Samples,
        held_out: Samples | None,
        target_head: Tensor,
        identity: Mapping[str, Any],
        replaced: Mapping[str, Any] | None = None,
        strategy: StrategyName = "ddp",
    ) -> None:
        """Continue from the newest checkpoint, or start.

        Args:
            config: of the run.
            draft: to train.
            train: samples to learn from.
            held_out: samples for `eval.every`.
            target_head: [V,T].
            identity: what the run depends on, for resuming.
            replaced: identity of the finished run whose place this one takes.
            strategy: how the run is spread over processes.

        Raises:
            UserError: there are checkpoints of a third run.
        """
        self.config, self.fit = config, config.fit
        self.draft, self.train, self.held_out = draft, train, held_out
        self.lengths = list(train.lengths)
        self.identity = identity
        self.processes = Processes()
        self.is_main = self.processes.is_main
        self.checkpoints = config.out / "checkpoints"
        kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
        module = Distillation(draft, target_head[kept].float(), config.fit)
        self.strategy = make_strategy(strategy, module, config.fit, self.processes)
        self.teacher_head = module.teacher_head
        if self.is_main and replaced is not None:
            discard_run(self.checkpoints, replaced)
        self.processes.wait()
        self.progress = self._continue()
        self.steps = self._plan()
        self.saved_step = 0  # of the last checkpoint of this process

    def _continue(self) -> Progress:
        """Take up the newest checkpoint; none means step 0."""
        found = newest_checkpoint(self.checkpoints, self.identity)
        if found is None:
            return Progress()
        self.strategy.restore(found.weights(), found.moments())
        return found.progress

    def _plan(self) -> list[list[int]]:
        """The samples of every optimiser step of the run."""
        fit = self.fit
        if isinstance(self.train, RollingStore):  # shuffled when it was planned
            return pack(range(len(self.train)), self.lengths, fit.batch_tokens)[: fit.max_steps]
        steps: list[list[int]] = []
        for epoch in range(fit.epochs):
            steps += epoch_batches(self.lengths, fit.batch_tokens, self.config.seed, epoch)
        return steps[: fit.max_steps]

    def run(self) -> Outcome:
        """Train to the end, or until Ctrl-C, and leave a checkpoint."""
        self._say_start()
        metrics: dict[str, Any] = {}
        reset_peak_memory(self.processes.device)
        ahead_of = range(self.progress.step, len(self.steps))
        self.batches = ahead(self._read, ahead_of, depth=1)
        with interrupts() as asked, self._sinks() as sinks, closing(self.batches):
            interrupted = False
            while self.progress.step < len(self.steps) and not interrupted:
                metrics, interrupted = self._step(asked)
                self._after_step(metrics, interrupted, sinks)
        return Outcome(self.progress, interrupted, metrics)

    def _read(self, step: int) -> list[Batch]:
        """The micro-batches of a step that fall to this process."""
        mine = share(self.steps[step], self.lengths, self.processes.count)[self.processes.rank]
        groups = pack(mine, self.lengths, self.fit.micro_batch_tokens)
        batches = [Batch.pack([self.train[i] for i in group]) for group in groups]
        return [b.pinned() for b in batches] if self.processes.device.type == "cuda" else batches

    def _sinks(self) -> AbstractContextManager[list[Sink]]:
        """Who learns of each step: nobody in any process but the first."""
        if not self.is_main:
            return nullcontext([])
        return open_sinks(self.config, self.progress.step, StepTable("fit", len(self.steps)))

    def save(self) -> None:
        """Write the trained draft to OUT/draft."""
        target = self.config.target
        facts = {
            "target": target,
            "target_files": fingerprint(target),
            "tokenizer_files": tokenizer_fingerprint(target),
            "step": self.progress.step,
        }
        with self.strategy.whole() as draft:
            if self.is_main:
                # The map comes from the data, so one of zero offsets means the first ids.
                save_draft(draft, self.config.out / "draft", metadata=facts, identity_map=True)
        self.processes.wait()

    def _say_start(self) -> None:
        if not self.is_main:
            return
        for path in incomplete(self.checkpoints):
            console.print(f"{path} is incomplete and passed over")
        if self.progress.step:
            console.print(f"fit continues from {self.checkpoints}/step-{self.progress.step}")

    def _step(self, asked: list[int]) -> tuple[dict[str, Any], bool]:
        """One optimiser step; returns its metrics and whether any process was asked to stop."""
        began = time.monotonic()
        fit, processes = self.fit, self.processes
        batches = next(self.batches)
        waited = time.monotonic() - began
        # The middle of the step, so that neither the first nor the last is spent at a rate of 0.
        middle = (self.progress.step + 0.5) / len(self.steps)
        length = unroll_length(fit, middle)
        t2d = self.draft.t2d if self.draft.config.is_pruned else None
        slots = [supervised_slots(b, length, t2d, fit.loss_convention) for b in batches]
        counted = torch.zeros(length, dtype=torch.float64)
        for s in slots:
            counted += s.sum(1)
        shared = [sum(map(len, batches)), sum(int(b.loss_mask.sum()) for b in batches), bool(asked)]
        shared = torch.tensor(shared, dtype=torch.float64)
        *counted, tokens, supervised, stop = processes.sum(torch.cat([counted, shared])).tolist()
        counted = torch.tensor(counted, dtype=torch.float64)
        weights = fit.step_weight ** torch.arange(length, dtype=torch.float64)
        weights = (weights / normaliser(fit.loss_convention, counted, int(tokens))).float()

        work = list(zip(batches, slots, strict=True))
        loss, counts = self._sum(*self.strategy.backward(work, weights))
        rate = fit.learning_rate * learning_rate_factor(fit, middle)
        norm = self._update(rate, bool(counted.sum()))
        seconds = time.monotonic() - began
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            elapsed=self.progress.elapsed + seconds,
            tokens=self.progress.tokens + int(tokens),
        )
        metrics = {
            "step": self.progress.step,
            "loss": loss,
            **counts.summary(),
            "learning_rate": rate,
            "grad_norm": norm,
            "tokens": self.progress.tokens,
            "samples": len(self.steps[self.progress.step - 1]),
            "supervised_fraction": supervised / tokens,
            "tokens_per_s": tokens / seconds,
            "data_wait_s": waited,
            "compute_s": seconds - waited,
            **memory(processes.device),
            "elapsed": self.progress.elapsed,
        }
        return metrics, stop > 0

    def _sum(self, loss: Tensor, counts: StepCounts) -> tuple[float, StepCounts]:
        """Over all processes."""
        summed = self.processes.sum(torch.cat([loss[None], counts.values.flatten()]))
        return float(summed[0]), StepCounts(summed[1:].view_as(counts.values))

    def _update(self, rate: float, supervised: bool) -> float:
        norm = self.strategy.update(rate, apply=supervised)
        if not math.isfinite(norm):
            raise UserError(
                f"the gradient of step {self.progress.step + 1} is {norm}; the weights of the "
                "last checkpoint are intact: lower fit.learning_rate, or use fit.dtype=float32"
            )
        return norm

    def _after_step(
        self, metrics: dict[str, Any], interrupted: bool, sinks: Sequence[Sink]
    ) -> None:
        step, last = self.progress.step, self.progress.step == len(self.steps)
        every = self.config.eval.every
        if self.held_out is not None and every and (step % every == 0 or last):
            metrics["eval"] = self._evaluate(self.held_out)
        for sink in sinks:
            sink.write(metrics)
        due = self.fit.save_every and step % self.fit.save_every == 0
        if self._is_best(metrics) or due or last or interrupted:
            self._save_checkpoint()

    def _is_best(self, metrics: Mapping[str, Any]) -> bool:
        """Whether this step was evaluated and is better than all before; notes it if so."""
        found, best = metrics.get("eval", {}).get("accept_length"), self.progress.best_accept_length
        if found is None or (best is not None and found <= best):
            return False
        self.progress = replace(
            self.progress, best_step=self.progress.step, best_accept_length=found
        )
        return True

    def _evaluate(self, samples: Samples) -> dict[str, Any]:
        settings, processes = self.config.eval, self.processes
        mine = share(range(len(samples)), samples.lengths, processes.count)[processes.rank]
        with self.strategy.whole() as draft:
            counts = evaluate(
                draft,
                samples,
                mine,
                self.teacher_head,
                settings.num_speculative_tokens,
                settings.batch_tokens,
            )
        return StepCounts(processes.sum(counts.values)).summary()

    def _release(self) -> None:
        """Let go of what the checkpoint before this one needs no more: it may have to take over."""
        if isinstance(self.train, RollingStore):
            self.train.release(sum(map(len, self.steps[: self.saved_step])))
        self.saved_step = self.progress.step

    def _save_checkpoint(self) -> None:
        moments = self.strategy.moments()
        with self.strategy.whole() as draft:
            if self.is_main:
                sync(self.config.out / "metrics.jsonl")  # no checkpoint is ahead of its metrics
                save_checkpoint(
                    self.checkpoints, self.progress, draft, moments, self.identity, self.fit.keep
                )
                self._release()
        self.processes.wait()
