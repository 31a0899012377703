"""Prepared data is reused while all it depends on is the same, and made again otherwise."""

from pathlib import Path

import pytest

from eagle3_train.data import ChatTemplate, Prepared, cached, prepare, prepared_from


def _load(path: Path, source: str, template: ChatTemplate, limit: int = 40) -> tuple[Prepared, int]:
    """The examples, and how often they were prepared for that."""
    made: list[Prepared] = []

    def make() -> Prepared:
        made.append(prepare([source], template, max_length=limit, progress=False))
        return made[-1]

    return cached(path, prepared_from([source], template, limit, False), make), len(made)


@pytest.fixture
def source(write_rows, chat) -> str:
    rows = [{"messages": chat("q", "a" * 30)}, {"no": 1}, {"messages": chat("\ud83d", "b")}]
    return write_rows(*rows)


def test_the_second_time_gives_the_same(tmp_path: Path, source: str, chatml) -> None:
    path = tmp_path / "deep" / "train.safetensors"
    first, made = _load(path, source, chatml)
    again, made_again = _load(path, source, chatml)
    assert (made, made_again) == (1, 0)
    assert [e.where for e in again.examples] == [e.where for e in first.examples]
    for left, right in zip(first.examples, again.examples, strict=True):
        assert left.input_ids.equal(right.input_ids)
        assert left.loss_mask.equal(right.loss_mask)
    assert again.drops.by_reason() == first.drops.by_reason()
    assert len(first.warnings()) == 3
    assert again.warnings() == first.warnings()
    assert again.sources == first.sources
    assert again.num_rows == 3


def test_each_change_is_named_and_made_again(
    tmp_path: Path, source: str, make_tokenizer, chatml: ChatTemplate, capsys
) -> None:
    path = tmp_path / "train.safetensors"
    _load(path, source, chatml)
    endings = tuple(chatml.eos_token_ids)
    bigger = make_tokenizer()
    bigger.add_tokens(["hello"])
    other = make_tokenizer(chatml.source.replace("<|im_end|>\n", "<|im_end|>"))
    changes = [
        ("tokenizer", ChatTemplate(bigger, eos_token_ids=endings), 40),
        ("chat template, tokenizer", ChatTemplate(other, eos_token_ids=endings), 40),
        ("chat template, end-of-turn ids", ChatTemplate(make_tokenizer()), 40),
        ("end-of-turn ids, max_length", chatml, 41),
    ]
    for named, template, limit in changes:
        assert _load(path, source, template, limit)[1] == 1
        assert f"made with other {named}; made again" in capsys.readouterr().err
        assert _load(path, source, template, limit)[1] == 0
        capsys.readouterr()
    Path(source).write_text('{"text": "<|im_start|>assistant\\nx<|im_end|>\\n"}\n')
    assert _load(path, source, chatml, 41)[1] == 1
    assert "made with other data; made again" in capsys.readouterr().err


def test_a_torn_file_is_made_again(tmp_path: Path, source: str, chatml, capsys) -> None:
    path = tmp_path / "train.safetensors"
    _load(path, source, chatml)
    path.write_bytes(path.read_bytes()[:-9])
    assert _load(path, source, chatml)[1] == 1
    assert "is not a whole file of prepared examples; made again" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_data_of_a_hub_is_read_anew(chatml) -> None:
    assert prepared_from(["some/dataset"], chatml, 40, False) is None
