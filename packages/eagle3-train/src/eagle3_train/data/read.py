"""Conversations from files and datasets, in one form, each with the line it came from."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_core import UserError
from eagle3_core.errors import as_user_error
from eagle3_train.data.drops import Drops, Unusable

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
_FILES = (".jsonl", ".json", ".parquet")
_UNLABELLED = -100
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Conversation:
    """One row: `messages`, `text` that a template has already been applied to, or `tokens`."""

    where: str  # file:line
    messages: tuple[Message, ...] = ()  # role is system, user, assistant or tool; content a string
    text: str | None = None
    tokens: tuple[list[int], list[bool]] | None = None  # ids, and whether each is supervised
    tools: tuple[Any, ...] = ()
    id: Any = None  # as the row gave it
    finish_reason: str | None = None  # "length": the last answer was cut, it has no end-of-turn


@dataclass(frozen=True)
class Rows:
    """What was read."""

    conversations: list[Conversation] = field(default_factory=list)
    replaced_surrogates: list[str] = field(default_factory=list)  # where U+FFFD was put in


def read_conversations(sources: Sequence[str], drops: Drops) -> Rows:
    """Read every source, in order.

    Args:
        sources: files (.jsonl, .json, .parquet), folders of such files, or ids of the `datasets`
            library, `name` or `name:split`.
        drops: takes the unusable rows.

    Raises:
        UserError: a source is missing or unreadable, or (strict drops) a row is unusable.
    """
    rows = Rows()
    for source in sources:
        for where, value in _raw_rows(source, drops):
            value, replaced = _without_surrogates(value)
            if replaced:
                rows.replaced_surrogates.append(where)
            try:
                rows.conversations.append(to_conversation(where, value))
            except Unusable as reason:
                drops.add(where, str(reason))
    return rows


def to_conversation(where: str, row: Any) -> Conversation:
    """Normalise one parsed row.

    Known keys: `messages` (role, content), `conversations` (from, value), `text` (rendered),
    `input_ids` with `loss_mask` or `labels`, or `prompt` (one user turn); optionally `id`, `tools`,
    `finish_reason`.

    Raises:
        Unusable: with the reason.
    """
    if not isinstance(row, dict):
        raise Unusable(f"a JSON {type(row).__name__}, expected an object")
    common = {"where": where, "id": row.get("id"), "finish_reason": row.get("finish_reason")}
    if common["finish_reason"] == "error":
        raise Unusable("marked as failed (finish_reason is error)")
    tools = tuple(_json_list(row.get("tools"), "tools"))
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            turns = row[key]
            if not isinstance(turns, list) or not turns:
                raise Unusable(f"{key} is not a list of turns")
            return Conversation(messages=tuple(map(_message, turns)), tools=tools, **common)
    if row.get("input_ids") is not None:
        return Conversation(tokens=_tokens(row), **common)
    if isinstance(row.get("text"), str):
        return Conversation(text=row["text"], **common)
    if isinstance(row.get("prompt"), str):
        prompt = {"role": "user", "content": row["prompt"]}
        return Conversation(messages=(prompt,), tools=tools, **common)
    raise Unusable("none of messages, conversations, input_ids, text, prompt")


def _tokens(row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """Ids with their mask, without padding.

    `labels` are those of transformers: not shifted, the token's own id or -100.
    """
    ids = _integers(row, "input_ids", None)
    if row.get("loss_mask") is not None:
        mask = _integers(row, "loss_mask", len(ids))
        if at := [i for i, flag in enumerate(mask) if flag not in (0, 1)]:
            raise Unusable(f"loss_mask[{at[0]}] is {mask[at[0]]}, expected 0 or 1")
    elif row.get("labels") is not None:
        labels = _integers(row, "labels", len(ids))
        for i, label in enumerate(labels):
            if label not in (_UNLABELLED, ids[i]):
                raise Unusable(
                    f"labels[{i}] is {label}, expected {_UNLABELLED} or input_ids[{i}], {ids[i]} "
                    "(labels are not shifted)"
                )
        mask = [label != _UNLABELLED for label in labels]
    else:
        raise Unusable("input_ids without loss_mask or labels, which say what is supervised")
    seen = [1] * len(ids)
    if row.get("attention_mask") is not None:
        seen = _integers(row, "attention_mask", len(ids))
    kept = [i for i, flag in enumerate(seen) if flag]
    return [ids[i] for i in kept], [bool(mask[i]) for i in kept]


def _integers(row: dict[str, Any], name: str, length: int | None) -> list[int]:
    values = row[name]
    if not isinstance(values, list) or not values:
        raise Unusable(f"{name} is not a list of integers")
    for i, value in enumerate(values):
        if not isinstance(value, int):  # true and false are integers
            raise Unusable(f"{name}[{i}] is {value!r}, expected an integer")
    if length is not None and len(values) != length:
        raise Unusable(f"{name} has {len(values)} entries, input_ids has {length}")
    return values


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise Unusable("a turn is not an object")
    name = turn.get("role", turn.get("from"))
    if name not in ROLES:
        raise Unusable(f"unknown role {name!r}")
    rest = {
        key: value
        for key, value in turn.items()
        if value is not None and key not in ("role", "from", "content", "value", "tool_calls")
    }
    message: Message = {"role": ROLES[name], "content": _content(turn), **rest}
    if tool_calls := _json_list(turn.get("tool_calls"), "tool_calls"):
        message["tool_calls"] = tool_calls
    return message


def _content(turn: Message) -> str:
    content = turn["content"] if "content" in turn else turn.get("value")
    if content is None:  # OpenAI's form of a turn that only calls tools
        return ""
    if isinstance(content, list):  # OpenAI's content parts
        parts = [p for p in content if isinstance(p, dict) and p.get("type") == "text"]
        texts = [p["text"] for p in parts if isinstance(p.get("text"), str)]
        if len(texts) < len(content):
            raise Unusable("content has parts that are not text")
        return "".join(texts)
    if not isinstance(content, str):
        raise Unusable(f"content is a {type(content).__name__}, expected text")
    return content


def _json_list(value: Any, name: str) -> list[Any]:
    """A list, given as one or as its JSON text; none is empty."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError:
            raise Unusable(f"{name} is a string but not JSON") from None
    if value is None:
        return []
    if not isinstance(value, list):
        raise Unusable(f"{name} is not a list")
    return value


def _raw_rows(source: str, drops: Drops) -> Iterator[tuple[str, Any]]:
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in _FILES)
        if not files:
            raise UserError(f"{source}: holds no {', '.join(_FILES)} file")
        for file in files:
            yield from _file_rows(file, drops)
    elif path.exists() or path.suffix in _FILES:
        yield from _file_rows(path, drops)
    else:
        yield from _dataset_rows(source)


def _file_rows(path: Path, drops: Drops) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}; expected a conversations file"
        ) from error
    if path.suffix == ".json":
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            pass  # JSON lines under another name
        else:
            rows = document if isinstance(document, list) else [document]
            yield from ((f"{path}[{i}]", row) for i, row in enumerate(rows))
            return
    # Only "\n" ends a row: JSON strings may hold U+2028, U+0085 and the like unescaped.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            drops.add(where, "not a line of JSON in UTF-8")
        else:
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    from datasets import Dataset  # noqa: PLC0415  (seconds to import, needed by few sources)

    if not path.is_file():
        raise UserError(f"{path}: cannot be read: no such file; expected a conversations file")
    with as_user_error(f"{path}: is not a parquet file"):
        table = Dataset.from_parquet(str(path), keep_in_memory=True)
    yield from ((f"{path}[{i}]", row) for i, row in enumerate(table))


def _dataset_rows(source: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset  # noqa: PLC0415  (seconds to import, needed by few sources)

    name, _, split = source.partition(":")
    with as_user_error(f"{source}: neither a file nor a dataset that can be loaded"):
        table = load_dataset(name, split=split or "train")
    yield from ((f"{source}[{i}]", row) for i, row in enumerate(table))


def _without_surrogates(value: Any) -> tuple[Any, bool]:
    """Put U+FFFD for unpaired surrogates, which JSON escapes can spell but no tokenizer encodes."""
    if isinstance(value, str):
        cleaned = _SURROGATE.sub("\ufffd", value)
        return cleaned, cleaned != value
    if isinstance(value, list):
        items = [_without_surrogates(item) for item in value]
        return [item for item, _ in items], any(hit for _, hit in items)
    if isinstance(value, dict):
        pairs = [(key, *_without_surrogates(item)) for key, item in value.items()]
        return {key: item for key, item, _ in pairs}, any(hit for _, _, hit in pairs)
    return value, False
