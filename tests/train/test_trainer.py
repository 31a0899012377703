"""The loop: it learns, it does not depend on how a step is cut up, and it continues bit for bit."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_core import DraftConfig, Eagle3Draft, UserError, load_draft
from eagle3_core.vocab import vocab_map
from eagle3_train.config import StrategyName, TrainConfig
from eagle3_train.distill import normaliser
from eagle3_train.metrics import MEASURED
from eagle3_train.schedule import learning_rate_factor, unroll_length
from eagle3_train.trainer import Trainer

V, D, T, H = 32, 24, 16, 16


class Document:
    """Tokens of a fixed successor chain, and states of a target that knows it."""

    def __init__(self, length: int, head: Tensor, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        start = int(torch.randint(20, (1,), generator=g))
        self.input_ids = (start + torch.arange(length)) % 20
        self.loss_mask = torch.arange(length) >= 3
        self.argmax = (self.input_ids + 1) % 20
        self.final = 3 * head[self.argmax]
        self.logz = (self.final @ head.T).logsumexp(-1)
        self.aux = torch.cat([self.final + 0.1 * torch.randn(length, T, generator=g)] * 3, -1)


class Documents(list[Document]):
    @property
    def lengths(self) -> list[int]:
        return [len(d.input_ids) for d in self]


def head() -> Tensor:
    return torch.randn(V, T, generator=torch.Generator().manual_seed(5))


def documents(count: int, seed: int = 0) -> Documents:
    return Documents(Document(8 + (7 * i) % 11, head(), seed + i) for i in range(count))


def draft() -> Eagle3Draft:
    config = DraftConfig(
        hidden_size=H, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=V, draft_vocab_size=D, target_hidden_size=T,
        num_aux_hidden_states=3, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    built = Eagle3Draft(config)
    built.init_weights(torch.Generator().manual_seed(1), std=0.1)
    d2t, t2d = vocab_map(torch.tensor([*range(20), 28, 29, 30, 31]), V)
    built.d2t.copy_(d2t)
    built.t2d.copy_(t2d)
    return built


def trainer(
    out: Path,
    samples: Documents | None = None,
    strategy: StrategyName = "ddp",
    every: int | None = None,
    **fit: Any,
) -> Trainer:
    fit = {"ttt_length": 3, "batch_tokens": 64, "micro_batch_tokens": 32, "epochs": 2} | fit
    config = TrainConfig.model_validate(
        {
            "output": str(out),
            "target": "chain",
            "fit": fit,
            "eval": {"num_speculative_tokens": 3, "every": every},
        }
    )
    identity = {"fit": config.fit.model_dump()}
    samples = documents(24) if samples is None else samples
    held_out = documents(4, 100)
    return Trainer(config, draft(), samples, held_out, head(), identity, strategy=strategy)


def steady(path: Path) -> list[dict[str, Any]]:
    """The log without what a clock decides."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in m.items() if k not in MEASURED} for m in lines]


def test_it_learns_the_chain(tmp_path: Path) -> None:
    run = trainer(tmp_path, epochs=20, learning_rate=1e-2, clip_norm=1.0)
    before = run._evaluate(documents(4, 100))["accept_length"]
    outcome = run.run()
    after = run._evaluate(documents(4, 100))["accept_length"]
    assert not outcome.interrupted
    assert before < 2
    assert after > 3.5  # of 4: K = 3 and the bonus token
    losses = [m["loss"] for m in steady(tmp_path / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "fit",
    [
        {},
        {
            "ttt_ramp": {"start": 1, "share": 0.8},
            "loss": {"kl": 1.0, "lk_alpha": 0.5},
            "gradient_checkpointing": True,
        },
    ],
    ids=["plain", "ramp"],
)
def test_continues_bit_for_bit(tmp_path: Path, fit: dict[str, Any]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    first = trainer(whole, save_every=3, keep=9, **fit)
    first.run()
    last = len(first.steps)
    assert last > 6
    shutil.copytree(whole, cut)
    for step in range(4, last + 1):
        shutil.rmtree(cut / f"checkpoints/step-{step}", ignore_errors=True)
    second = trainer(cut, save_every=3, keep=9, **fit)
    assert second.progress.step == 3
    second.run()

    for name, tensor in first.draft.state_dict().items():
        assert torch.equal(tensor, second.draft.state_dict()[name]), name
    assert steady(whole / "metrics.jsonl") == steady(cut / "metrics.jsonl")
    assert trainer(cut, save_every=3, keep=9, **fit).run().metrics == {}  # nothing left to do
    lengths = [len(m["loss_per_step"]) for m in steady(cut / "metrics.jsonl")]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 3
    assert lengths[0] == (1 if fit else 3)


_KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_trainer import trainer
trainer(Path(sys.argv[2]), epochs=10, save_every=1, keep=1).run()
"""


def test_killed_at_any_moment_it_continues_bit_for_bit(tmp_path: Path) -> None:
    # With a checkpoint after each step, most kills fall into the writing of one.
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    first = trainer(whole, epochs=10, save_every=1, keep=1)
    first.run()
    moments = random.Random(0)
    for _ in range(2):
        log = cut / "metrics.jsonl"
        before = log.stat().st_size if log.exists() else 0
        command = [sys.executable, "-c", _KILLED, str(Path(__file__).parent), str(cut)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not log.exists() or log.stat().st_size <= before:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(moments.random() / 2)
        process.kill()
        assert process.wait() == -signal.SIGKILL  # before it was done
    second = trainer(cut, epochs=10, save_every=1, keep=1)
    assert 0 < second.progress.step < len(second.steps)
    second.run()
    for name, tensor in first.draft.state_dict().items():
        assert torch.equal(tensor, second.draft.state_dict()[name]), name
    assert steady(whole / "metrics.jsonl") == steady(cut / "metrics.jsonl")


def test_the_best_by_accept_length_is_kept(tmp_path: Path) -> None:
    run = trainer(tmp_path, every=2, keep=1, epochs=4, learning_rate=3e-2, clip_norm=1.0)
    run.run()
    measured = [
        (m["eval"]["accept_length"], -m["step"])
        for m in steady(tmp_path / "metrics.jsonl")
        if "eval" in m
    ]
    length, step = max(measured)
    best = json.loads((tmp_path / "checkpoints/best.json").read_text())
    assert best == {"path": f"step-{-step}", "step": -step, "accept_length": length}
    kept = {best["path"], f"step-{len(run.steps)}", "best.json"}
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == kept


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_every=2, keep=9)
    run.run()
    newest, *older = sorted(
        (tmp_path / "checkpoints").iterdir(), key=lambda p: -int(p.name.removeprefix("step-"))
    )
    moments = newest / "optimizer.safetensors"
    moments.write_bytes(moments.read_bytes()[:-7])
    (older[0] / "draft/model.safetensors").unlink()
    (older[1] / "state.json").write_text("{")
    (tmp_path / "checkpoints/.step-99.tmp").mkdir()
    expected = int(older[2].name.removeprefix("step-"))
    assert trainer(tmp_path, save_every=2, keep=9).progress.step == expected


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    trainer(tmp_path, save_every=1, keep=2, max_steps=5).run()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-4", "step-5"]


def test_another_config_is_refused_by_name(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1).run()
    with pytest.raises(UserError, match=r"step-1: written with fit\.learning_rate = 0\.0001, this"):
        trainer(tmp_path, max_steps=1, learning_rate=1e-3)


def test_micro_batches_do_not_change_the_result(tmp_path: Path) -> None:
    runs = [trainer(tmp_path / str(n), micro_batch_tokens=n, max_steps=4) for n in (16, 64)]
    for run in runs:
        run.run()
    small, large = (r.draft.state_dict() for r in runs)
    for name in small:
        # float32 sums in another order, through four AdamW steps of 1e-4.
        torch.testing.assert_close(small[name], large[name], rtol=0, atol=2e-6, msg=name)


def test_a_step_without_supervision_changes_nothing(tmp_path: Path) -> None:
    silent = documents(6)
    for document in silent:
        document.loss_mask[:] = False
    run = trainer(tmp_path, silent, weight_decay=0.1)
    before = {n: p.clone() for n, p in run.draft.state_dict().items()}
    outcome = run.run()
    assert outcome.metrics["loss"] == 0
    assert all(torch.equal(before[n], p) for n, p in run.draft.state_dict().items())


def test_frozen_parts_stay(tmp_path: Path) -> None:
    run = trainer(tmp_path, train_head=False, max_steps=3)
    before = {n: p.clone() for n, p in run.draft.state_dict().items()}
    run.run()
    after = run.draft.state_dict()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert {"embed_tokens.weight", "lm_head.weight"}.isdisjoint(changed)
    assert {"fc.weight", "norm.weight", "layers.0.mlp.up_proj.weight"} <= changed


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    runs = {d: trainer(tmp_path / d, dtype=d, max_steps=3) for d in ("float32", "bfloat16")}
    losses = {d: run.run().metrics["loss"] for d, run in runs.items()}
    # bf16 keeps 8 bits: relative 2**-8 on logits of order 1.
    assert losses["float32"] == pytest.approx(losses["bfloat16"], rel=2e-2)
    assert losses["float32"] != losses["bfloat16"]
    assert all(p.dtype == torch.float32 for p in runs["bfloat16"].draft.parameters())


def test_the_final_draft_loads(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1)
    run.run()
    run.save()
    loaded = load_draft(tmp_path / "draft").draft.state_dict()
    assert all(torch.equal(p, loaded[n]) for n, p in run.draft.state_dict().items())


def test_a_diverged_run_stops_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    samples = documents(12)
    run = trainer(tmp_path, samples, save_every=1, epochs=1)
    poisoned = run.steps[1][0]
    samples[poisoned].aux[4:] = torch.inf
    with pytest.raises(UserError, match="the gradient of step 2 is nan"):
        run.run()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_the_unroll_grows_evenly() -> None:
    values = {"ttt_length": 4, "ttt_ramp": {"start": 2, "share": 0.5}}
    fit = TrainConfig.model_validate({"output": "o", "target": "t", "fit": values}).fit
    progress = [0.0, 0.24, 0.26, 0.49, 0.5, 1.0]
    assert [unroll_length(fit, p) for p in progress] == [2, 2, 3, 3, 4, 4]


def test_schedule_and_normalisers() -> None:
    def fit(schedule: str) -> Any:
        values = {"schedule": schedule, "warmup_ratio": 0.1}
        return TrainConfig.model_validate({"output": "o", "target": "t", "fit": values}).fit

    assert learning_rate_factor(fit("cosine"), 0.05) == 0.5
    assert learning_rate_factor(fit("cosine"), 0.55) == pytest.approx(0.5)
    assert learning_rate_factor(fit("linear"), 0.55) == pytest.approx(0.5)
    assert learning_rate_factor(fit("cosine"), 1.0) == pytest.approx(0)
    assert learning_rate_factor(fit("constant"), 1.0) == 1
    counted = torch.tensor([4.0, 0.0])
    assert normaliser("strict", counted, 9).tolist() == [4, 1]
    assert normaliser("specforge", counted, 9).tolist() == [9, 9]
    assert normaliser("eagle", counted, 9).tolist() == [9, 9]
    assert normaliser("speculators", counted, 9).tolist() == pytest.approx([4.00001, 1e-5])
