"""The training loop: the same optimiser steps on any number of processes."""

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from eagle3_core import Eagle3Draft, UserError, save_draft
from eagle3_train.config import Dtype, FitConfig, LossConvention, TrainConfig
from eagle3_train.display import StepTable, console
from eagle3_train.evaluate import Samples, evaluate, run_slots
from eagle3_train.metrics import StepCounts, memory, reset_peak_memory
from eagle3_train.order import epoch_batches, pack, share
from eagle3_train.resume import (
    Progress,
    discard_run,
    incomplete,
    load_checkpoint,
    save_checkpoint,
)
from eagle3_train.trackers import Sink, open_sinks
from eagle3_train.ttt import Batch, supervised_slots


class Distillation(nn.Module):
    """The draft with its loss, as one module that data-parallel wrappers can hold."""

    teacher_head: Tensor

    def __init__(self, draft: Eagle3Draft, teacher_head: Tensor, fit: FitConfig) -> None:
        super().__init__()
        self.draft = draft
        self.dtype: Dtype = fit.dtype
        self.register_buffer("teacher_head", teacher_head, persistent=False)

    def forward(
        self, batch: Batch | None, slots: Tensor, step_weights: Tensor
    ) -> tuple[Tensor, StepCounts]:
        """One micro-batch -> (its part of the loss, counts); None = nothing, zero gradients."""
        if batch is None:
            zero = sum(p.sum() * 0 for p in self.draft.parameters() if p.requires_grad)
            assert isinstance(zero, Tensor)
            return zero, StepCounts.zeros(len(slots))
        result, counts = run_slots(
            self.draft, batch, slots, self.teacher_head, step_weights, self.dtype
        )
        return result.total, counts


def normaliser(convention: LossConvention, counted: Tensor, slots: int) -> Tensor:
    """[K]: what the summed loss of each step is divided by.

    strict: the supervised slots of the step. specforge, eagle: all slots. speculators: the
    supervised slots + 1e-5.
    """
    if convention in ("specforge", "eagle"):
        return torch.full_like(counted, float(slots))
    if convention == "speculators":
        return counted + 1e-5
    return counted.clamp(min=1)


def learning_rate_factor(fit: FitConfig, progress: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1] of the run."""
    if progress < fit.warmup_ratio:
        return progress / fit.warmup_ratio
    done = (progress - fit.warmup_ratio) / max(1 - fit.warmup_ratio, 1e-9)
    if fit.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return 1.0 if fit.schedule == "constant" else max(0.0, 1 - done)


def make_optimizer(draft: Eagle3Draft, fit: FitConfig) -> torch.optim.AdamW:
    """AdamW over what trains; norms and biases do not decay."""
    draft.requires_grad_(True)
    draft.embed_tokens.requires_grad_(fit.train_embeddings)
    draft.lm_head.requires_grad_(fit.train_head)
    trained = [p for p in draft.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": fit.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    first, second = fit.betas
    return torch.optim.AdamW(groups, lr=fit.learning_rate, betas=(first, second), fused=True)


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

        Raises:
            UserError: there are checkpoints of a third run.
        """
        self.config, self.fit = config, config.fit
        self.draft, self.train, self.held_out = draft, train, held_out
        self.lengths = list(train.lengths)
        self.identity = identity
        self.accelerator = _join_processes()
        self.is_main = self.accelerator.is_main_process
        self.checkpoints = config.out / "checkpoints"
        kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
        module = Distillation(draft, target_head[kept].float(), config.fit)
        self.optimizer = make_optimizer(draft, config.fit)
        self.module = self.accelerator.prepare(module)
        self.teacher_head = module.teacher_head
        with self.accelerator.main_process_first():
            if self.is_main and replaced is not None:
                discard_run(self.checkpoints, replaced)
        self.progress = load_checkpoint(self.checkpoints, draft, self.optimizer, identity)
        self.steps = self._plan()

    def _plan(self) -> list[list[int]]:
        """The samples of every optimiser step of the run."""
        fit = self.fit
        steps: list[list[int]] = []
        for epoch in range(fit.epochs):
            steps += epoch_batches(self.lengths, fit.batch_tokens, self.config.seed, epoch)
        return steps[: fit.max_steps]

    def run(self) -> Outcome:
        """Train to the end, or until Ctrl-C, and leave a checkpoint."""
        self._say_start()
        metrics: dict[str, Any] = {}
        reset_peak_memory(self.accelerator.device)
        with _interrupts() as asked, self._sinks() as sinks:
            interrupted = False
            while self.progress.step < len(self.steps) and not interrupted:
                metrics, interrupted = self._step(asked)
                self._after_step(metrics, interrupted, sinks)
        return Outcome(self.progress, interrupted, metrics)

    def _sinks(self) -> AbstractContextManager[list[Sink]]:
        """Who learns of each step: nobody in any process but the first."""
        if not self.is_main:
            return nullcontext([])
        return open_sinks(self.config, self.progress.step, StepTable("fit", len(self.steps)))

    def save(self) -> None:
        """Write the trained draft to OUT/draft."""
        if self.is_main:
            facts = {"target": self.config.target, "step": self.progress.step}
            # The map comes from the data, so one of zero offsets means the first ids.
            save_draft(self.draft, self.config.out / "draft", metadata=facts, identity_map=True)
        self.accelerator.wait_for_everyone()

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
        fit, world = self.fit, self.accelerator.num_processes
        indices = self.steps[self.progress.step]
        mine = share(indices, self.lengths, world)[self.accelerator.process_index]
        groups = pack(mine, self.lengths, fit.micro_batch_tokens)
        batches = [Batch.pack([self.train[i] for i in group]) for group in groups]
        waited = time.monotonic() - began
        t2d = self.draft.t2d if self.draft.config.is_pruned else None
        slots = [supervised_slots(b, fit.ttt_length, t2d, fit.loss_convention) for b in batches]
        counted = torch.zeros(fit.ttt_length, dtype=torch.float64)
        for s in slots:
            counted += s.sum(1)
        shared = [sum(map(len, batches)), sum(int(b.loss_mask.sum()) for b in batches), bool(asked)]
        shared = torch.tensor(shared, dtype=torch.float64)
        *counted, tokens, supervised, stop = self._sum(torch.cat([counted, shared])).tolist()
        counted = torch.tensor(counted, dtype=torch.float64)
        weights = fit.step_weight ** torch.arange(fit.ttt_length, dtype=torch.float64)
        weights = (weights / normaliser(fit.loss_convention, counted, int(tokens))).float()

        loss, counts = self._backward(batches, slots, weights)
        # The middle of the step, so that neither the first nor the last is spent at a rate of 0.
        middle = (self.progress.step + 0.5) / len(self.steps)
        rate = fit.learning_rate * learning_rate_factor(fit, middle)
        norm = self._update(rate, bool(counted.sum()))
        seconds = time.monotonic() - began
        self.progress = Progress(
            self.progress.step + 1,
            self.progress.elapsed + seconds,
            self.progress.tokens + int(tokens),
        )
        metrics = {
            "step": self.progress.step,
            "loss": loss,
            **counts.summary(),
            "learning_rate": rate,
            "grad_norm": norm,
            "tokens": self.progress.tokens,
            "samples": len(indices),
            "supervised_fraction": supervised / tokens,
            "tokens_per_s": tokens / seconds,
            "data_wait_s": waited,
            "compute_s": seconds - waited,
            **memory(self.accelerator.device),
            "elapsed": self.progress.elapsed,
        }
        return metrics, stop > 0

    def _backward(
        self, batches: Sequence[Batch], slots: Sequence[Tensor], weights: Tensor
    ) -> tuple[float, StepCounts]:
        """Gradients of the whole step's loss; returns it and the counts, over all processes."""
        device, world = self.accelerator.device, self.accelerator.num_processes
        loss = torch.zeros((), dtype=torch.float64)
        counts = StepCounts.zeros(self.fit.ttt_length)
        nothing = torch.zeros(self.fit.ttt_length, 0, dtype=torch.bool)
        work = list(zip(batches, slots, strict=True)) or [(None, nothing)]
        for i, (batch, rows) in enumerate(work):
            last = i == len(work) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                moved = None if batch is None else batch.to(device)
                part, counted = self.module(moved, rows, weights)
                # Data-parallel wrappers average over processes; the loss is a sum over them.
                self.accelerator.backward(part * world)
            loss += part.detach().double().cpu()
            counts += counted
        summed = self._sum(torch.cat([loss[None], counts.values.flatten()]))
        return float(summed[0]), StepCounts(summed[1:].view_as(counts.values))

    def _update(self, rate: float, supervised: bool) -> float:
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.fit.clip_norm)
        norm = float(norm) if norm is not None else 0.0
        if not math.isfinite(norm):
            raise UserError(
                f"the gradient of step {self.progress.step + 1} is {norm}; the weights of the "
                "last checkpoint are intact: lower fit.learning_rate, or use fit.dtype=float32"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if supervised:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
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
        if due or last or interrupted:
            self._save_checkpoint()

    def _evaluate(self, samples: Samples) -> dict[str, Any]:
        settings = self.config.eval
        mine = share(range(len(samples)), samples.lengths, self.accelerator.num_processes)
        counts = evaluate(
            self.draft,
            samples,
            mine[self.accelerator.process_index],
            self.teacher_head,
            settings.num_speculative_tokens,
            settings.batch_tokens,
        )
        return StepCounts(self._sum(counts.values)).summary()

    def _save_checkpoint(self) -> None:
        if self.is_main:
            save_checkpoint(
                self.checkpoints,
                self.progress,
                self.draft,
                self.optimizer,
                self.identity,
                self.fit.keep,
            )
        self.accelerator.wait_for_everyone()

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over processes."""
        summed = self.accelerator.reduce(values.to(self.accelerator.device), "sum")
        assert isinstance(summed, Tensor)
        return summed.cpu()


def _join_processes() -> Accelerator:
    """All processes of this run, which the environment names as torchrun does.

    Raises:
        RuntimeError: this process would train alone, beside others that do the same.
    """
    # Without a device accelerate takes each process for a run of its own, unless told the CPU.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected:
        raise RuntimeError(
            f"{accelerator.num_processes} processes joined, WORLD_SIZE is {expected}"
        )
    return accelerator


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM: the step in progress is finished and saved; a second kills."""
    asked: list[int] = []

    def handle(number: int, frame: object) -> None:
        if asked:
            signal.default_int_handler(number, None)
        asked.append(number)

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
