"""Rows of every form are read, and the others are named."""

import json
from pathlib import Path

import pytest

from eagle3_core import UserError
from eagle3_train.data import Conversation, Drops, read_conversations


def _turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def _read(path: Path | str) -> tuple[list[Conversation], Drops]:
    drops = Drops()
    return read_conversations([str(path)], drops).conversations, drops


def _messy(bom: bytes, end: bytes) -> bytes:
    """Lines 1,2,4,5,8,9 are usable, 3 is blank, 6 is cut, 7 is an array; no newline at the end."""
    question = '{"id": "%s", "messages": [{"role": "user", "content": "%s"}, '
    answer = '{"role": "assistant", "content": "%s"}]}'
    lines = [
        question % ("r1", "plain") + answer % "one",
        question % ("r2", "line\u2028sep and next\u0085line") + answer % "two",
        "",
        question % ("r4", "half \\ud83d emoji") + answer % "three",
        question % ("r5", "nul \\u0000 inside") + answer % "four",
        '{"id": "r6", "messages": [{"role": "user", "content": "cut of',
        "[1, 2, 3]",
        question % ("r8", "pair 😀 and \\ud83d\\ude00 ok") + answer % "five",
        question % ("r9", "last line, no newline") + answer % "six",
    ]
    return bom + end.join(line.encode() for line in lines)


def test_a_messy_file_gives_its_usable_rows(tmp_path: Path) -> None:
    path = tmp_path / "messy.jsonl"
    path.write_bytes(_messy(b"\xef\xbb\xbf", b"\r\n"))
    drops = Drops()
    rows = read_conversations([str(path)], drops)
    assert [c.where.rpartition(":")[2] for c in rows.conversations] == list("124589")
    answers = [c.messages[1]["content"] for c in rows.conversations]
    assert answers == ["one", "two", "three", "four", "five", "six"]
    questions = [c.messages[0]["content"] for c in rows.conversations]
    assert questions[1] == "line\u2028sep and next\u0085line"
    assert questions[2] == "half \ufffd emoji"
    assert questions[3] == "nul \0 inside"
    assert questions[4] == "pair 😀 and 😀 ok"
    assert rows.replaced_surrogates == [f"{path}:4"]
    assert [where.rpartition(":")[2] for where, _ in drops.rows] == ["6", "7"]


def test_byte_order_mark_and_line_ends_change_nothing(tmp_path: Path) -> None:
    messages = []
    for name, bom, end in (("a", b"\xef\xbb\xbf", b"\r\n"), ("b", b"", b"\n")):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(_messy(bom, end))
        messages.append([c.messages for c in _read(path)[0]])
    assert messages[0] == messages[1]


def test_strict_names_the_first_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "messy.jsonl"
    path.write_bytes(_messy(b"", b"\n"))
    with pytest.raises(UserError, match=r"messy\.jsonl:6: not a line of JSON"):
        read_conversations([str(path)], Drops(strict=True))


def test_invalid_utf8_is_one_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n{"prompt": "ok"}\n')
    rows, drops = _read(path)
    assert [row.messages[0]["content"] for row in rows] == ["ok"]
    assert [where for where, _ in drops.rows] == [f"{path}:1"]


def test_sharegpt_roles_are_kept_in_order(write_rows) -> None:
    def row(*pairs: tuple[str, str]) -> dict:
        return {"conversations": [{"from": name, "value": value} for name, value in pairs]}

    path = write_rows(
        row(("system", "answer in rhyme"), ("human", "q"), ("gpt", "a")),
        row(
            ("system", "use tools"),
            ("human", "weather?"),
            ("function_call", '{"name": "weather"}'),
            ("observation", "12 degrees"),
            ("gpt", "it is 12"),
        ),
        row(("human", "q"), ("tool", "tool text"), ("gpt", "a")),
        row(("narrator", "once"), ("human", "q"), ("gpt", "a")),
    )
    rows, drops = _read(path)
    roles = [[message["role"] for message in row.messages] for row in rows]
    assert roles == [
        ["system", "user", "assistant"],
        ["system", "user", "assistant", "tool", "assistant"],
        ["user", "tool", "assistant"],
    ]
    assert rows[1].messages[2]["content"] == '{"name": "weather"}'
    assert drops.rows == [(f"{path}:4", "unknown role 'narrator'")]


def test_tool_calls_as_list_or_as_text_are_the_same(write_rows) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {}}}]
    rows, _ = _read(
        write_rows(
            *(
                {"messages": [{"role": "assistant", "content": None, "tool_calls": value}]}
                for value in (calls, json.dumps(calls))
            )
        )
    )
    assert rows[0].messages == rows[1].messages
    assert rows[0].messages[0] == {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "messages is not a list of turns"),
        ({"messages": ["hi"]}, "a turn is not an object"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is a int"),
        ({"messages": [{"role": "assistant", "tool_calls": "no"}]}, "tool_calls is a string but"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts that are not"),
        ({"input_ids": [1]}, "input_ids without loss_mask or labels"),
        ({"input_ids": 5, "labels": [1]}, "input_ids is not a list of integers"),
        ({"input_ids": [1, "2"], "labels": [1, 2]}, "input_ids[1] is '2', expected an integer"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries, input_ids has 2"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask[1] is 2, expected 0 or 1"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels[0] is 2, expected -100 or"),
        ({"question": "?"}, "none of messages, conversations, input_ids, text, prompt"),
        ({"prompt": "?", "finish_reason": "error"}, "marked as failed"),
    ],
)
def test_unusable_rows_say_why(write_rows, row: dict, reason: str) -> None:
    rows, drops = _read(write_rows(row))
    assert not rows
    assert reason in drops.rows[0][1]


def test_content_parts_join(write_rows) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rows, _ = _read(write_rows({"messages": [{"role": "user", "content": parts}]}))
    assert rows[0].messages == ({"role": "user", "content": "ab"},)


def test_json_documents_and_folders(tmp_path: Path) -> None:
    one = {"messages": _turns(("user", "1"))}
    (tmp_path / "a.json").write_text(json.dumps([one, {"prompt": "2"}], indent=1))
    (tmp_path / "b.json").write_text('{"prompt": "3"}\n{"prompt": "4"}\n')  # JSON lines in truth
    (tmp_path / "c.json").write_text(json.dumps({"prompt": "5"}, indent=1))
    (tmp_path / "notes.txt").write_text("not data")
    rows, drops = _read(tmp_path)
    assert [row.messages[0]["content"] for row in rows] == list("12345")
    assert rows[1].where == f"{tmp_path / 'a.json'}[1]"
    assert not len(drops)


def test_parquet(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "x.parquet"
    table = {"messages": [_turns(("user", "q"), ("assistant", "a"))], "id": [7]}
    datasets.Dataset.from_dict(table).to_parquet(path)
    rows, _ = _read(path)
    assert rows[0].messages == tuple(_turns(("user", "q"), ("assistant", "a")))
    assert (rows[0].id, rows[0].where) == (7, f"{path}[0]")


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: cannot be read"):
        _read(tmp_path / name)


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"x\.parquet: is not a parquet file"):
        _read(path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no \.jsonl"):
        _read(tmp_path)


@pytest.mark.parametrize(
    "more", [{"loss_mask": [0, 1, 1, 0]}, {"loss_mask": [False, True, True, False]},
             {"labels": [-100, 8, 9, -100]}]
)  # fmt: skip
def test_rows_of_token_ids(write_rows, more: dict) -> None:
    padded = {"input_ids": [7, 8, 9, 0], **more, "attention_mask": [1, 1, 1, 0]}
    (whole, cut), drops = _read(write_rows({"input_ids": [7, 8, 9, 0], **more}, padded))
    assert not drops.rows
    assert whole.tokens == ([7, 8, 9, 0], [False, True, True, False])
    assert cut.tokens == ([7, 8, 9], [False, True, True])
