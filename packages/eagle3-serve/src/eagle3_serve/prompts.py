"""Prompts to token ids, for the server and for `generate` alike."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3_core import UserError
from eagle3_core.errors import as_user_error

Message = Mapping[str, Any]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a plain prompt, special tokens as the tokenizer adds them.

    Text that already begins with the bos token keeps that one only.

    Raises:
        UserError: the text is empty, or not encodable.
    """
    if not is_unicode(text):
        raise UserError("prompt: holds an unpaired surrogate, expected valid Unicode text")
    # The engine judges the length: the tokenizer's own warning (verbose) would be a second message.
    token_ids = list(tokenizer(text, verbose=False)["input_ids"])
    if len(token_ids) > 1 and token_ids[0] == token_ids[1] == tokenizer.bos_token_id:
        del token_ids[0]
    if not token_ids:
        raise UserError("prompt: is empty, expected at least one token")
    return token_ids


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins.

    The template alone decides about bos: its text is encoded without added special tokens.

    Raises:
        UserError: there is no chat template, it refuses these messages, or it has no place for
            tools.
    """
    if not tokenizer.chat_template:
        raise UserError("messages: the target has no chat template; send a plain prompt instead")
    if not all(is_unicode(message["content"]) for message in messages):
        raise UserError("messages: hold an unpaired surrogate, expected valid Unicode text")
    token_ids = _render(tokenizer, messages, tools)
    if not token_ids:
        raise UserError("messages: the target's chat template renders them to nothing")
    if tools and token_ids == _render(tokenizer, messages, ()):
        raise UserError("tools: the target's chat template has no place for them; leave them out")
    return token_ids


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
) -> list[int]:
    # Templates raise what they like: their own errors, of several lines too, TypeError, ...
    with as_user_error("messages: the target's chat template refuses them"):
        token_ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
    return list(token_ids)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompts file."""

    where: str  # file and line, for messages
    values: dict[str, Any]  # as read; holds `prompt` or `messages`

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids.

        Raises:
            UserError: see `encode_text` and `encode_chat`; names the line.
        """
        try:
            if "prompt" in self.values:
                return encode_text(tokenizer, self.values["prompt"])
            return encode_chat(tokenizer, self.values["messages"])
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from error


def read_prompts(path: Path) -> list[PromptRow]:
    """Rows of a JSON-lines file, each `{"prompt": text}` or `{"messages": [...]}`; more keys pass.

    Raises:
        UserError: file missing, unreadable or without rows; names the line of the first bad row.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    # Only "\n" ends a line: JSON strings may hold other Unicode line separators as they are.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path}: has no rows, expected one JSON object a line")
    return [_row(f"{path}:{number}", line) for number, line in lines]


def is_unicode(text: str) -> bool:
    """Whether `text` can be encoded; JSON escapes can spell lone surrogates, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _row(where: str, line: str) -> PromptRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: holds {_kind(row)}, expected an object")
    if ("prompt" in row) == ("messages" in row):
        found = "both" if "prompt" in row else "neither"
        raise UserError(f"{where}: has {found} of prompt and messages, expected one of them")
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise UserError(f"{where}: prompt is {_kind(row['prompt'])}, expected a string")
    else:
        _check_messages(where, row["messages"])
    return PromptRow(where, row)


def _check_messages(where: str, messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages is {_kind(messages)}, expected a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise UserError(f"{where}: messages[{i}] is {_kind(message)}, expected an object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = _kind(message[key]) if key in message else "missing"
                raise UserError(f"{where}: messages[{i}].{key} is {found}, expected a string")


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list" if value else "an empty list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
