"""Answers are the target's own, whatever the batch; a restart redoes nothing and loses nothing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_core import UserError
from eagle3_core.target import Target
from eagle3_train.data import ChatTemplate, prepare
from eagle3_train.generate import Answer, Request, generate, sample
from eagle3_train.regenerate import Regenerated, Sampling, regenerate

PROMPTS = [list(b"abc"), list(b"a longer prompt than the rest"), [7], list(b"xyzw"), list(b"hi")]


def _reference(target: Target, prompt: Sequence[int], count: int) -> tuple[list[int], str]:
    """Greedy decoding by whole forwards of the model's own code."""
    ids = list(prompt)
    for _ in range(count):
        token = int(target.model(torch.tensor([ids])).logits[0, -1].argmax())
        if token in target.eos_token_ids:
            return ids[len(prompt) :], "stop"
        ids.append(token)
    return ids[len(prompt) :], "length"


def _answers(target: Target, requests: list[Request], batch_size: int) -> dict[int, Answer]:
    return {answer.index: answer for answer in generate(target, requests, batch_size)}


def _ending_at(target: Target, prompt: Sequence[int], step: int) -> Target:
    """The same target with the id of the greedy answer's token `step` as its end of text."""
    ids, _ = _reference(target, prompt, step + 1)
    target.model.generation_config.eos_token_id = [ids[step]]
    return target


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 16])
def test_greedy_answers_are_the_targets_own(make_target, batch_size: int) -> None:
    target = _ending_at(make_target(), PROMPTS[1], 4)
    requests = [Request(i, prompt, 5 + 3 * i) for i, prompt in enumerate(PROMPTS)]
    answers = _answers(target, requests, batch_size)
    for request in requests:
        expected = _reference(target, request.prompt_ids, request.max_tokens)
        got = answers[request.index]
        assert (got.token_ids, got.finish_reason) == expected
    assert {answer.finish_reason for answer in answers.values()} == {"stop", "length"}


def test_sampled_answers_depend_on_their_seed_alone(target: Target) -> None:
    requests = [Request(i, PROMPTS[i % 5], 12, 1.0, 0.9, seed=i) for i in range(10)]
    alone = {i: _answers(target, [requests[i]], 1)[i].token_ids for i in range(10)}
    together = _answers(target, requests, 4)
    assert {i: answer.token_ids for i, answer in together.items()} == alone
    assert alone[0] != alone[5]  # the same prompt, another seed


def test_greedy_and_sampled_requests_share_a_batch(target: Target) -> None:
    requests = [Request(0, PROMPTS[0], 9), Request(1, PROMPTS[0], 9, temperature=2.0, seed=3)]
    answers = _answers(target, requests, 2)
    assert answers[0].token_ids == _reference(target, PROMPTS[0], 9)[0]
    assert answers[1].token_ids != answers[0].token_ids


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.8)])
def test_sampling_has_the_distribution_it_should(temperature: float, top_p: float) -> None:
    """Each token owns a piece of [0,1) as long as its probability: count a fine, even grid."""
    logits = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2]).log()
    weights = logits.double().div(temperature).exp()
    weights /= weights.sum()
    if top_p < 1:  # 0.4 + 0.3 do not reach 0.8, with 0.2 they do
        weights[[0, 2]] = 0
        weights /= weights.sum()
    grid = 2000
    drawn = [sample(logits, temperature, top_p, (i + 0.5) / grid) for i in range(grid)]
    counts = torch.bincount(torch.tensor(drawn), minlength=5)
    # A piece of length p holds p * grid points, give or take one.
    assert (counts - weights * grid).abs().max() <= 1
    assert sample(logits, temperature, top_p, 0.0) != 2  # no mass, never drawn
    assert sample(logits, temperature, top_p, 1 - 2**-53) != 2


def test_windowed_and_recurrent_targets_are_refused(make_target) -> None:
    target = make_target()
    target.model.config.layer_types = ["sliding_attention"] * 4
    target.model.config.sliding_window = 16
    assert _answers(target, [Request(0, [1], 15)], 1)[0].token_ids
    with pytest.raises(UserError, match="sliding window of 16"):
        _answers(target, [Request(0, [1], 16)], 1)
    target.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match="linear_attention layers cannot answer"):
        _answers(target, [Request(0, [1], 4)], 1)


def _run(
    target: Target, template: ChatTemplate, source: str, output: Path, **more: Any
) -> Regenerated:
    sampling = more.pop("sampling", Sampling(max_tokens=6))
    return regenerate(target, template, [source], output, sampling, progress=False, **more)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _ask(text: str, **more: Any) -> dict[str, Any]:
    return {**more, "messages": [{"role": "user", "content": text}]}


INPUT = [
    _ask("alpha", id=1),
    _ask("beta", id=1),
    _ask("gamma", id="1"),
    _ask("delta"),
    _ask("epsilon"),
    _ask("zeta", id=7),
    _ask("same text", id=8),
    _ask("same text", id=9),
]


def _asked(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((repr(row.get("id")), row["messages"][0]["content"]) for row in rows)


def test_resume_gives_each_row_exactly_one_result(
    target: Target, chatml: ChatTemplate, write_rows, tmp_path: Path
) -> None:
    """Ids are missing, doubled and of two types; the last line is cut in half."""
    source, output = write_rows(*INPUT), tmp_path / "out.jsonl"

    def done(row: dict[str, Any], answer: str) -> str:
        turns = [*row["messages"], {"role": "assistant", "content": answer}]
        return json.dumps({"id": row["id"], "messages": turns})

    whole = [done(INPUT[0], "A"), done(INPUT[5], "Z")]
    output.write_text("\n".join([*whole, done(INPUT[6], "S")[:52]]))
    result = _run(target, chatml, source, output)
    assert (result.num_resumed, result.num_answered) == (2, 6)
    rows = _rows(output)
    assert _asked(rows) == _asked(INPUT)
    assert [row["messages"][1]["content"] for row in rows[:2]] == ["A", "Z"]
    before = output.read_bytes()
    assert _run(target, chatml, source, output).num_answered == 0
    assert output.read_bytes() == before


def test_a_row_inserted_at_the_top_adds_one_result(
    target: Target, chatml: ChatTemplate, write_rows, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    _run(target, chatml, write_rows(*INPUT), output)
    before = output.read_bytes()
    _run(target, chatml, write_rows(_ask("first", id=0), *INPUT), output)
    assert output.read_bytes().startswith(before)
    assert _rows(output)[-1]["messages"][0]["content"] == "first"
    assert len(_rows(output)) == 9


def test_stopped_anywhere_it_ends_with_the_same_rows(
    target: Target, chatml: ChatTemplate, write_rows, tmp_path: Path
) -> None:
    source, whole, cut = write_rows(*INPUT), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    sampling = Sampling(max_tokens=6, temperature=1.0, seed=5)
    _run(target, chatml, source, whole, sampling=sampling, batch_size=3)
    data = whole.read_bytes()
    expected = sorted(data.split(b"\n"))
    for size in range(0, len(data), 177):
        cut.write_bytes(data[:size])
        _run(target, chatml, source, cut, sampling=sampling, batch_size=2)
        assert sorted(cut.read_bytes().split(b"\n")) == expected


def test_answers_of_other_settings_are_not_mixed(
    target: Target, chatml: ChatTemplate, write_rows, tmp_path: Path
) -> None:
    source, output = write_rows(*INPUT), tmp_path / "out.jsonl"
    _run(target, chatml, source, output)
    before = output.read_bytes()
    with pytest.raises(UserError, match="was written with max_tokens 6, now it is 7"):
        _run(target, chatml, source, output, sampling=Sampling(7))
    assert output.read_bytes() == before


def test_a_file_that_is_no_result_is_left_alone(
    target: Target, chatml: ChatTemplate, write_rows, tmp_path: Path
) -> None:
    output = tmp_path / "precious.txt"
    output.write_text("shopping list\nmilk")
    with pytest.raises(UserError, match=r"precious\.txt:1: is not a regenerated conversation"):
        _run(target, chatml, write_rows(*INPUT), output)
    assert output.read_text() == "shopping list\nmilk"


def test_a_prompt_that_does_not_fit_is_marked_and_not_tried_again(
    make_target, chatml: ChatTemplate, write_rows, tmp_path: Path
) -> None:
    target = make_target(max_position_embeddings=64)
    source, output = write_rows(_ask("x" * 60, id=1), _ask("ok", id=2)), tmp_path / "out.jsonl"
    result = _run(target, chatml, source, output)
    assert (result.num_failed, result.num_answered) == (1, 1)
    failed = next(row for row in _rows(output) if row["id"] == 1)
    assert failed["finish_reason"] == "error"
    assert "exceed the target's 64" in failed["error"]
    assert len(failed["messages"]) == 1
    assert _run(target, chatml, source, output).num_resumed == 2
    prepared = prepare([str(output)], chatml, max_length=64, progress=False)
    assert [reason for _, reason in prepared.drops.rows] == [
        "marked as failed (finish_reason is error)"
    ]


def test_a_cut_answer_is_marked_and_trains_without_end_of_turn(
    target: Target, chatml: ChatTemplate, write_rows, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    result = _run(target, chatml, write_rows(_ask("go")), output, sampling=Sampling(9))
    (row,) = _rows(output)
    assert (result.num_cut, row["finish_reason"]) == (1, "length")
    (example,) = prepare([str(output)], chatml, max_length=99, progress=False).examples
    answer = chatml.encode(row["messages"][1]["content"]).ids
    assert answer
    assert example.input_ids[example.loss_mask].tolist() == answer
    assert bool(example.loss_mask[-1])


def test_the_last_question_is_answered_again(
    target: Target, chatml: ChatTemplate, write_rows, chat, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    _run(target, chatml, write_rows({"messages": chat("a", "b", "c", "old")}), output)
    (row,) = _rows(output)
    assert row["messages"][:3] == chat("a", "b", "c")
    prompt = chatml.encode(chatml.render(chat("a", "b", "c"), open_answer=True)).ids
    ids, _ = _reference(target, prompt, 6)
    assert row["messages"][3]["content"] == chatml.decode(ids, skip_special_tokens=True).rstrip(
        "\ufffd"
    )


def test_several_answers_a_prompt(
    target: Target, chatml: ChatTemplate, write_rows, tmp_path: Path
) -> None:
    source, output = write_rows(_ask("go"), _ask("run")), tmp_path / "out.jsonl"
    sampling = Sampling(12, temperature=1.5, seed=1)
    result = _run(
        target, chatml, source, output, sampling=sampling, samples_per_prompt=3, greedy_first=True
    )
    rows = _rows(output)
    assert (result.num_answered, len(rows)) == (6, 6)
    answers = {
        (row["messages"][0]["content"], row["sample"]): row["messages"][1]["content"]
        for row in rows
    }
    assert len(set(answers.values())) == 6
    greedy = tmp_path / "greedy.jsonl"
    _run(target, chatml, source, greedy, sampling=Sampling(12))
    assert {row["messages"][1]["content"] for row in _rows(greedy)} == {
        answers["go", 0], answers["run", 0],
    }  # fmt: skip


def test_equal_answers_are_not_drawn_several_times(
    target: Target, chatml: ChatTemplate, write_rows, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match="samples_per_prompt is 2 at temperature 0"):
        _run(target, chatml, write_rows(_ask("go")), output, samples_per_prompt=2)
    assert not output.exists()


def test_nothing_to_answer(
    target: Target, chatml: ChatTemplate, write_rows, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="nothing to answer"):
        _run(target, chatml, write_rows([1]), tmp_path / "out.jsonl")
