"""The target's chat template: rendering, and what it says about where answers begin and end."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3_core import UserError
from eagle3_train.data.drops import Unusable
from eagle3_train.data.read import Message

_MARKER = re.compile(r"\{%-?\s*generation\b")
_DATE = re.compile(r"strftime_now\(\s*[\"'](.+?)[\"']")
_ANSWER = "PROBEANSWER"
_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "PROBEQUESTION"},
    {"role": "assistant", "content": _ANSWER},
)


@dataclass(frozen=True)
class Encoding:
    """Token ids with the [start, end) characters each came from."""

    ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True)
class Turn:
    """How the template writes an answer: `opening` + answer + `ending` + `tail`.

    The target reads `opening`, writes the answer and `ending` (empty where the template has no
    end-of-turn token), and never writes `tail`.
    """

    opening: str
    ending: str
    tail: str


class ChatTemplate:
    """A tokenizer's chat template, or the one in `file` in its place.

    Args:
        tokenizer: of the target.
        file: a Jinja file that replaces the tokenizer's template.
        eos_token_ids: ids that end an answer even where the tokenizer does not call them special.
        arguments: further variables of the template, such as `enable_thinking`.

    Raises:
        UserError: no template, an argument it does not know, or not a fast tokenizer (masks need
            character offsets).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        file: str | Path | None = None,
        eos_token_ids: Sequence[int] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.arguments = dict(arguments or {})
        self.ending_ids = self.eos_token_ids | frozenset(tokenizer.all_special_ids)
        self._override = _read_template(file) if file is not None else None
        name = tokenizer.name_or_path
        if not tokenizer.is_fast:
            raise UserError(f"tokenizer of {name}: has no fast version, which the loss mask needs")
        if self._override is None and not tokenizer.chat_template:
            raise UserError(
                f"tokenizer of {name}: has no chat template; "
                "name a Jinja file in data.chat_template"
            )
        for argument in self.arguments:
            if not re.search(rf"\b{re.escape(argument)}\b", self.source):
                raise UserError(
                    f"data.template_arguments: the chat template of {name} has no {argument!r}; "
                    "correct the name or leave it out"
                )

    @property
    def source(self) -> str:
        """The Jinja text in use."""
        return self.tokenizer.get_chat_template(self._override)

    @property
    def tokenizer_json(self) -> str:
        """All that decides how text becomes tokens."""
        backend: Any = self.tokenizer.backend_tokenizer  # transformers annotates it too widely
        return backend.to_str()

    @property
    def marks_answers(self) -> bool:
        """Whether the template says itself what the assistant writes: `{% generation %}`."""
        return _MARKER.search(self.source) is not None

    @cached_property
    def writes_the_date(self) -> bool:
        """Whether the same rows become other tokens tomorrow."""
        formats = _DATE.findall(self.source)
        return any(time.strftime(form) in self._answered_probe for form in formats)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), open_answer: bool = False
    ) -> str:
        """The text of `messages`; `open_answer` ends it where the assistant would begin to write.

        Raises:
            Unusable: the template refuses the messages.
        """
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=open_answer)

    def marked(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[bool]:
        """Per token of the rendered text: whether it lies between the template's markers.

        Raises:
            Unusable: the template refuses the messages.
        """
        encoded = self._apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return [bool(flag) for flag in encoded["assistant_masks"]]

    def encode(self, text: str) -> Encoding:
        """Token ids of rendered text; the template alone decides about bos, nothing is added."""
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return Encoding(list(encoded["input_ids"]), list(encoded["offset_mapping"]))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)  # a list only for a batch
        return text

    def with_template_bos(self, text: str) -> str:
        """Preformatted text with as many bos as the template writes: one or none at the start.

        One that the text already has is kept even if the template writes none.
        """
        bos = self.tokenizer.bos_token
        if not isinstance(bos, str) or not bos:
            return text
        bare = text
        while bare.startswith(bos):
            bare = bare.removeprefix(bos)
        rendered = self._answered_probe
        if rendered.startswith(bos) and rendered.count(bos) > 1:
            return text  # not a bos: ChatML tokenizers give the token that opens a turn that name
        return bos + bare if bare != text or rendered.startswith(bos) else text

    @cached_property
    def turn(self) -> Turn:
        """Read off a question and an answer that stand for any.

        Raises:
            UserError: the template cannot render a question with its answer as one after the other.
        """
        answered = self._answered_probe
        try:
            asked, opened = self.render(_PROBE[:1]), self.render(_PROBE[:1], open_answer=True)
        except Unusable as error:
            raise UserError(f"chat template: fails on one question: {error}") from error
        if answered.count(_ANSWER) != 1:
            raise UserError("chat template: does not render an assistant's answer exactly once")
        suffix = answered.partition(_ANSWER)[2]
        opening = opened.removeprefix(asked) if opened.startswith(asked) else ""
        end = self._end_of_turn(suffix)
        return Turn(opening, suffix[:end], suffix[end:])

    @cached_property
    def _answered_probe(self) -> str:
        try:
            return self.render(_PROBE)
        except Unusable as error:
            raise UserError(f"chat template: fails on one question and answer: {error}") from error

    def _end_of_turn(self, suffix: str) -> int:
        """Characters of `suffix` through its first ending token; 0 without one."""
        encoded = self.encode(suffix)
        for token, (_, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if token in self.ending_ids:
                return end
        return 0

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self._override,
                **self.arguments,
                **options,
            )
        except Exception as error:  # templates raise what they like
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise Unusable(f"the chat template refuses it: {reason}") from error


def _read_template(file: str | Path) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as a chat template: {error}") from error
