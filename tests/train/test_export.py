"""`eagle3-train export`: core's layouts, by the run's config."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3_core import DraftConfig, Eagle3Draft, load_draft, save_draft
from eagle3_core.checkpoint.consumers import CONSUMERS
from eagle3_train.cli import main


@pytest.fixture
def run(tmp_path: Path, write_run: Callable[[Path], Path]) -> Path:
    path = write_run(tmp_path)
    save(tmp_path / "out/draft")
    return path


def save(folder: Path, layers: int = 1) -> Eagle3Draft:
    config = DraftConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=40, draft_vocab_size=40, target_hidden_size=16,
        num_hidden_layers=layers, layer_input="every", num_target_layers=8, aux_layer_ids=(2, 4, 5),
        num_aux_hidden_states=3, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    draft = Eagle3Draft(config)
    draft.init_weights(torch.Generator().manual_seed(0))
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_draft(draft, folder)
    return draft


def test_the_draft_is_written_where_it_is_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--to", "sglang", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    folder = tmp_path / "out/export/sglang"
    assert result["output"] == str(folder)
    assert result["notes"] == list(CONSUMERS["sglang"].notes)
    written, ours = load_draft(folder).draft, load_draft(tmp_path / "out/draft").draft
    for name, tensor in ours.state_dict().items():
        assert torch.equal(written.state_dict()[name], tensor), name

    assert main(["export", str(run), "--to", "sglang"]) == 2
    assert "out/export/sglang: exists; choose another folder" in capsys.readouterr().err
    assert main(["export", str(run), "--to", "sglang", "--output", str(tmp_path / "b")]) == 0
    assert "note: start it with --speculative-algorithm EAGLE3" in capsys.readouterr().out


def test_what_an_engine_cannot_hold_is_refused_with_its_reason(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    save(other, layers=2)
    assert main(["export", str(run), "--to", "vllm", "--draft", str(other)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "its later layers take the hidden state alone" in error
    assert not (tmp_path / "out/export/vllm").exists()
