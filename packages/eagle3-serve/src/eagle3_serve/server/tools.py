"""Tool calls: how a model is told of tools, and how its calls are found in its text.

An answer that has to be a call (`tool_choice`: required, or a name) is written under a grammar. One
that may be a call is read by the parser that the operator named: models mark calls differently.
"""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from eagle3_serve.constraints import json_schema_grammar
from eagle3_serve.server.schema import Strict, bad


class Function(Strict):
    """What can be called."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    strict: bool | None = None


class Tool(Strict):
    """OpenAI's `tools` entry."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


def tool_name(value: object) -> str:
    """OpenAI's `tool_choice`: a word, or the name of the one function to call."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if value != {"type": "function", "function": {"name": name}} or not isinstance(name, str):
        raise bad(
            "tool_choice: must be none, auto, required or "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    return name


def forced_call_grammar(tools: Sequence[Tool], choice: str, is_parallel: bool) -> str:
    """A JSON list of calls, of any tool or of the one that was chosen."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
        if choice in ("required", tool.function.name)
    ]
    several = is_parallel and choice == "required"
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    return json_schema_grammar(schema if several else schema | {"maxItems": 1})


class CallReader(ABC):
    """Tells calls from text while the text comes in; what it holds back may be a call."""

    def __init__(self) -> None:
        """Before the first text."""
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; returns what is certainly no part of a call."""
        self._held += text
        shown = self._held[: self._start_of_calls(self._held)]
        self._held = self._held[len(shown) :]
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Text that turned out to be no call, and the calls; one of them is empty."""
        calls = self._parse(self._held)
        return ("", calls) if calls else (self._held, [])

    @abstractmethod
    def _start_of_calls(self, text: str) -> int:
        """Where calls may begin in `text`; its length if they cannot have begun."""

    @abstractmethod
    def _parse(self, text: str) -> list[dict[str, Any]]:
        """The calls that `text` consists of; none if it is not calls through and through."""


class HermesReader(CallReader):
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated."""

    _BLOCK = re.compile(r"\s*<tool_call>(.*?)</tool_call>\s*", re.DOTALL)
    # White space before a call belongs to it.
    _OPEN = re.compile(r"\s*(<tool_call>.*|<(t(o(o(l(_(c(a(ll?)?)?)?)?)?)?)?)?)?\Z", re.DOTALL)

    def _start_of_calls(self, text: str) -> int:
        match = self._OPEN.search(text)
        return match.start() if match else len(text)

    def _parse(self, text: str) -> list[dict[str, Any]]:
        if self._BLOCK.sub("", text):
            return []
        return _calls([_json(block) for block in self._BLOCK.findall(text)])


class Llama3Reader(CallReader):
    """Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several joined by `;`."""

    def _start_of_calls(self, text: str) -> int:
        return 0 if text.lstrip()[:1] in ("", "{") else len(text)

    def _parse(self, text: str) -> list[dict[str, Any]]:
        decoder, rest, found = json.JSONDecoder(), text.strip(), []
        while rest:
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return []
            found.append(value)
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
        return _calls(found)


class ForcedReader(CallReader):
    """The list of `forced_call_grammar`; cut off by the length limit it is text."""

    def _start_of_calls(self, text: str) -> int:
        return 0

    def _parse(self, text: str) -> list[dict[str, Any]]:
        values = _json(text)
        return _calls(values) if isinstance(values, list) else []


READERS: dict[str, type[CallReader]] = {"hermes": HermesReader, "llama3_json": Llama3Reader}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls(values: Sequence[Any]) -> list[dict[str, Any]]:
    """OpenAI's `tool_calls`; none at all if one of the values is not a call."""
    calls = []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return []
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(arguments, dict):
            return []
        function = {
            "name": value["name"],
            "arguments": json.dumps(arguments, ensure_ascii=False),
        }
        calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
    return calls
