"""What is kept, cut and dropped is said; what teaches nothing is refused."""

import io

import pytest
from rich.console import Console

from eagle3_core import UserError
from eagle3_train.data import ChatTemplate, Prepared, prepare, show
from eagle3_train.data.prepare import coloured

GOOD = "<|im_start|>user\nquestion {0}<|im_end|>\n<|im_start|>assistant\nanswer {0}<|im_end|>\n"
FOREIGN = "<|user|>\nquestion {0}\n<|assistant|>\nanswer {0}\n"


def _prepare(path: str, template: ChatTemplate, max_length: int = 100) -> Prepared:
    return prepare([path], template, max_length=max_length, progress=False)


def test_foreign_markers_everywhere_stop_the_run(chatml: ChatTemplate, write_rows) -> None:
    path = write_rows(*({"text": FOREIGN.format(i)} for i in range(4)))
    with pytest.raises(UserError, match="supervised fraction 0 of 4 rows") as caught:
        _prepare(path, chatml)
    assert "<|user|>\\nquestion 0" in str(caught.value)  # one decoded sample
    assert "\n" not in str(caught.value)


def test_a_row_with_foreign_markers_is_dropped_by_line(chatml: ChatTemplate, write_rows) -> None:
    rows = [{"text": GOOD.format(i)} for i in range(3)] + [{"text": FOREIGN.format(9)}]
    path = write_rows(*rows)
    prepared = _prepare(path, chatml)
    assert [e.where for e in prepared.examples] == [f"{path}:{i}" for i in (1, 2, 3)]
    assert prepared.drops.by_reason().popitem()[1] == [f"{path}:4"]
    assert (prepared.num_rows, prepared.supervised_fraction > 0) == (4, True)
    assert any(f"{path}:4" in warning for warning in prepared.warnings())


def test_the_fraction_is_counted_in_tokens(chatml: ChatTemplate, write_rows, chat) -> None:
    prepared = _prepare(write_rows({"messages": chat("hi", "hello")}), chatml)
    whole = len(chatml.encode(chatml.render(chat("hi", "hello"))).ids)
    assert prepared.num_tokens == whole
    assert prepared.supervised_fraction == 6 / whole  # five letters and end-of-turn


def test_what_max_length_cuts_is_counted(chatml: ChatTemplate, write_rows, chat) -> None:
    rows = [chat("q" * 30, "a" * 20), chat("q", "a" * 9), chat("q" * 99, "a")]
    path = write_rows(*({"messages": row} for row in rows))
    opening = len(chatml.encode(chatml.render(rows[0][:1], open_answer=True)).ids)
    prepared = _prepare(path, chatml, max_length=opening + 5)
    kept = prepared.examples
    assert len(kept[0].input_ids) == opening + 5
    assert [int(example.loss_mask.sum()) for example in kept] == [5, 10]
    assert prepared.cut_rows == [f"{path}:1", f"{path}:3"]
    assert prepared.cut_supervised_tokens == 16 + 2  # end-of-turn is a token too
    reason = f"nothing supervised within max_length, {opening + 5} tokens"
    assert prepared.drops.rows == [(f"{path}:3", reason)]


def test_a_suspicious_fraction_is_warned_of(make_tokenizer, write_rows, chat) -> None:
    source = "{%- for m in messages -%}{{ m.content }}{%- endfor -%}"
    template = ChatTemplate(make_tokenizer(source))
    prepared = _prepare(write_rows({"messages": chat("q", "a" * 50)}), template)
    assert any("98.0% of the tokens are supervised" in text for text in prepared.warnings())


def test_strict_ends_the_run(chatml: ChatTemplate, write_rows) -> None:
    path = write_rows({"text": GOOD.format(0)}, {"text": FOREIGN.format(1)})
    with pytest.raises(UserError, match=r"rows\.jsonl:2: nothing in it is supervised"):
        prepare([path], chatml, max_length=99, strict=True, progress=False)


def test_no_rows_at_all(chatml: ChatTemplate, write_rows) -> None:
    with pytest.raises(UserError, match="holds no rows"):
        _prepare(write_rows(), chatml)


def test_supervised_tokens_are_coloured(chatml: ChatTemplate, write_rows, chat) -> None:
    prepared = _prepare(write_rows({"messages": chat("hé", "wörld 😀")}), chatml)
    text = coloured(prepared.examples[0], chatml)
    assert text.plain == chatml.render(chat("hé", "wörld 😀"))
    green = [text.plain[s.start : s.end] for s in text.spans if s.style == "bold green"]
    assert green == ["wörld 😀<|im_end|>"]
    stream = io.StringIO()
    show(prepared, chatml, Console(file=stream, width=200))
    assert "1 rows, 1 examples" in stream.getvalue()
    assert "wörld 😀<|im_end|>" in stream.getvalue()


def test_token_ids_are_those_of_the_tokenizer(chatml: ChatTemplate, write_rows) -> None:
    size = len(chatml.tokenizer)
    path = write_rows(
        {"input_ids": [65, 66, 67], "loss_mask": [0, 1, 1]},
        {"input_ids": [65, size], "loss_mask": [0, 1]},
        {"input_ids": [65, 66], "loss_mask": [0, 0]},
    )
    prepared = _prepare(path, chatml)
    (example,) = prepared.examples
    assert example.input_ids.tolist() == [65, 66, 67]
    assert example.loss_mask.tolist() == [False, True, True]
    assert prepared.drops.rows == [
        (f"{path}:2", f"input_ids[1] is {size}, the tokenizer knows ids below {size}"),
        (f"{path}:3", "nothing in it is supervised"),
    ]


def test_sources_are_counted_one_by_one(chatml: ChatTemplate, write_rows) -> None:
    rows = [{"text": GOOD.format(i)} for i in range(3)] + [{"text": FOREIGN.format(9)}]
    first, second = write_rows(*rows, name="a.jsonl"), write_rows(*rows[:1], name="b.jsonl")
    prepared = prepare([first, second, second], chatml, max_length=100, progress=False)
    tokens = [len(example.input_ids) for example in prepared.examples]
    written = len("answer 0") + 1  # end-of-turn
    one, two = prepared.sources.values()
    assert (one.rows, one.dropped, one.examples) == (4, 1, 3)
    assert (two.rows, two.dropped, two.examples) == (2, 0, 2)
    assert (one.tokens, two.tokens) == (sum(tokens[:3]), sum(tokens[3:]))
    assert (one.supervised, two.supervised) == (3 * written, 2 * written)
    stream = io.StringIO()
    show(prepared, chatml, Console(file=stream, width=200))
    assert f"{first}: 4 rows, 1 dropped, 3 examples, " in stream.getvalue()
    assert f"together: 6 rows, 5 examples, {sum(tokens)} tokens" in stream.getvalue()
