"""The configuration refuses what it does not know and says where and what in one line."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from eagle3_core import UserError
from eagle3_train.config import LossTerm, load_config
from eagle3_train.objective import Objective

MINIMAL = "output: out\ntarget: some/model\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_sections_default_and_values_arrive(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL + "fit:\n  learning_rate: 1e-4\n  epochs: 3\n"))
    assert (config.fit.learning_rate, config.fit.epochs) == (1e-4, 3)
    assert config.fit.ttt_length == 5
    assert config.out == Path("out")


def test_overrides_are_typed_as_yaml_and_win(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "fit: {epochs: 3}\ncapture:\n")
    overrides = ["fit.epochs=7", "fit.learning_rate=2e-3", "capture.aux_layer_ids=[1, 2]",
                 "draft.vocab_size=null", "output=elsewhere"]  # fmt: skip
    config = load_config(path, overrides)
    assert config.fit.epochs == 7
    assert config.fit.learning_rate == 2e-3
    assert config.capture.aux_layer_ids == [1, 2]
    assert config.draft.vocab_size is None
    assert config.output == "elsewhere"


def test_a_loss_is_a_name_or_a_weighted_sum(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, MINIMAL)).fit.loss == {"soft_ce": 1.0}
    assert load_config(write(tmp_path, MINIMAL), ["fit.loss=tv"]).fit.loss == {"tv": 1.0}
    mixed = {"kl": 0.5, "lk_lambda": 2.0}
    assert load_config(write(tmp_path, MINIMAL), [f"fit.loss={mixed}"]).fit.loss == mixed
    assert {field.name for field in fields(Objective)} == set(get_args(LossTerm))


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (
            MINIMAL + "fit: {epoch: 1}",
            [],
            "run.yaml: fit.epoch: unknown key; did you mean 'epochs'",
        ),
        (MINIMAL + "trian: {}", [], "run.yaml: trian: unknown key; known are"),
        (MINIMAL + "fit: {epochs: 2.5}", [], "fit.epochs: found 2.5, expected a valid integer"),
        (MINIMAL + "fit: {epochs: '3'}", [], "fit.epochs: found '3', expected a valid integer"),
        (MINIMAL + "fit: {epochs: 0}", [], "fit.epochs: found 0, expected greater than"),
        (MINIMAL + "fit: {schedule: cosin}", [], "found 'cosin', expected 'cosine', 'linear'"),
        (MINIMAL + "fit: {betas: [0.9]}", [], "fit.betas: found [0.9]"),
        (MINIMAL + "fit: {loss: tvv}", [], "fit.loss.tvv: found 'tvv', expected 'soft_ce', 'kl'"),
        (MINIMAL + "fit: {loss: {}}", [], "fit.loss: found {}, expected"),
        (MINIMAL + "fit: {loss: {tv: 0}}", [], "fit.loss.tv: found 0, expected greater than 0"),
        (
            MINIMAL + "fit: {ttt_ramp: {start: 9}}",
            [],
            "run.yaml: fit: ttt_ramp.start is 9, expected at most ttt_length 5",
        ),
        (
            MINIMAL,
            ["fit.ttt_ramp.begin=1"],
            "fit.ttt_ramp.begin: unknown key; known are share, start",
        ),
        (MINIMAL + "data: {train: a.jsonl}", [], "data.train: found 'a.jsonl', expected a"),
        ("output: out\n", [], "run.yaml: target: missing"),
        ("- 1\n", [], "run.yaml: found list, expected a mapping"),
        ("", [], "run.yaml: found NoneType, expected a mapping"),
        ("output: [\n", [], "run.yaml:2:1: not YAML"),
        (MINIMAL + "seed: 1\nseed: 2\n", [], "run.yaml:4:1: not YAML: key 'seed' stands twice"),
        (MINIMAL, ["fit.epochs=x"], "override fit.epochs: found 'x', expected a valid integer"),
        (MINIMAL, ["fit.epochs"], "override 'fit.epochs': expected section.key=value"),
        (MINIMAL, ["seed.deep=1"], "override seed: found {'deep': 1}, expected a valid integer"),
        (MINIMAL + "seed: 1", ["seed.x=1"], "override 'seed.x=1': 'seed' holds 1, not a section"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    tmp_path: Path, text: str, overrides: list[str], expected: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert expected in message.replace(str(path), path.name)
    assert "\n" not in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: cannot be read"):
        load_config(tmp_path / "nowhere.yaml")
