"""Checkpoints on a bad day: a full disk, leftovers of a kill, a best one to keep."""

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3_core import DraftConfig, Eagle3Draft, UserError
from eagle3_train.resume import Progress, newest_checkpoint, save_checkpoint

IDENTITY = {"fit": {"seed": 0}}


def draft() -> Eagle3Draft:
    config = DraftConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=32, draft_vocab_size=32, target_hidden_size=16,
        num_aux_hidden_states=3, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    built = Eagle3Draft(config)
    built.init_weights(torch.Generator().manual_seed(0))
    return built


def moments(step: int) -> dict[str, Tensor]:
    return {"exp_avg/fc.weight": torch.full((64, 1024), float(step))}


def save(folder: Path, step: int, keep: int = 1, best: tuple[int, float] | None = None) -> None:
    measured = best or (None, None)
    save_checkpoint(
        folder, Progress(step, 0.0, 0, *measured), draft(), moments(step), IDENTITY, keep
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 100 kB: writing more fails as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    save(tmp_path, 2)
    request.getfixturevalue("small_files")
    with pytest.raises(
        UserError, match=r"step-4: .* cannot be written: .*File too large"
    ) as caught:
        save(tmp_path, 4)
    assert f"{tmp_path}/step-2 is intact" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step-2"]
    found = newest_checkpoint(tmp_path, IDENTITY)
    assert found is not None
    assert found.moments()["exp_avg/fc.weight"][0, 0] == 2


def test_the_best_stays_and_is_pointed_to(tmp_path: Path) -> None:
    save(tmp_path, 1, best=(1, 2.5))
    save(tmp_path, 2, best=(1, 2.5))
    save(tmp_path, 3, best=(1, 2.5))
    assert names(tmp_path) == ["best.json", "step-1", "step-3"]
    best = json.loads((tmp_path / "best.json").read_text())
    assert best == {"path": "step-1", "step": 1, "accept_length": 2.5}
    save(tmp_path, 4, best=(4, 2.75))
    assert names(tmp_path) == ["best.json", "step-4"]
    # The pointer is that of the checkpoint taken up, not of a later one that was lost.
    save(tmp_path, 5, keep=2, best=(5, 3.0))
    shutil.rmtree(tmp_path / "step-5")
    found = newest_checkpoint(tmp_path, IDENTITY)
    assert found is not None
    assert found.progress == Progress(4, 0.0, 0, 4, 2.75)
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 4


def test_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in (".step-9.tmp", ".step-0.old", "step-0"):
        (tmp_path / name).mkdir()
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-2"]
