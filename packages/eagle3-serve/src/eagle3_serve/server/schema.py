"""Parts of request bodies: strict models, and what an answer may have to look like."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from eagle3_serve.constraints import (
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)


def bad(message: str, param: str | None = None) -> PydanticCustomError:
    """A refusal with a complete message; `param` where the field at fault is another."""
    # The message goes in as context: pydantic would read braces in it as placeholders.
    return PydanticCustomError("api_field", "{message}", {"message": message, "param": param})


class Strict(BaseModel):
    """No unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JsonSchema(Strict):
    """A named JSON schema; it is always enforced, whatever `strict` says."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise bad("response_format: json_schema goes with type 'json_schema', and only there")
        return self

    def grammar_text(self) -> str | None:
        """The grammar; None for free text."""
        if self.json_schema is not None:
            return json_schema_grammar(self.json_schema.schema_)
        return json_schema_grammar({"type": "object"}) if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: exactly one of its fields."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        given = sum(value is not None for value in vars(self).values())
        if given != 1:
            found = "none" if given == 0 else given
            raise bad(f"structured_outputs: has {found} of json, regex, choice, grammar; give one")
        return self

    def grammar_text(self) -> str:
        """The grammar."""
        if self.json_ is not None:
            return json_schema_grammar(self.json_)
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        return lark_grammar(self.grammar or "")
