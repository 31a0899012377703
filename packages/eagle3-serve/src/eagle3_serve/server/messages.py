"""Turns of a conversation, as clients send them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from eagle3_serve.server.schema import Strict, bad

# These come back with a client's copy of an earlier answer, empty.
_EMPTY = ("annotations", "audio", "function_call", "name", "refusal", "tool_calls")


def _text_content(value: object) -> str:
    """Content as text; text parts are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise bad("content must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise bad("content parts must be {'type': 'text', 'text': ...}: only text is served")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise bad("content parts must hold a string 'text' and nothing else")
        texts.append(part["text"])
    return "".join(texts)


class CalledFunction(Strict):
    """What an assistant called."""

    name: str
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> "CalledFunction":
        try:
            parsed = json.loads(self.arguments)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise bad("arguments must be the text of a JSON object")
        return self


class Call(Strict):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text_content)]
    tool_calls: list[Call] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        kept = {k: v for k, v in values.items() if k not in _EMPTY or v not in (None, [])}
        if kept.get("tool_calls") and kept.get("content") is None:
            kept["content"] = ""  # a call needs no text beside it
        return kept

    @model_validator(mode="after")
    def _belongs_to_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise bad(f"tool_calls are an assistant's, not of role {self.role!r}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise bad("tool_call_id goes with role 'tool', and only there")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: arguments of calls are objects, not text."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
            for call in message["tool_calls"]:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return message
