"""Request bodies: what of the OpenAI API is honoured, and a 400 for everything that is not."""

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from eagle3_serve.prompts import is_unicode
from eagle3_serve.sampling import SamplingParams

MAX_CHOICES = 128  # per request: n times the number of prompts
MAX_STOPS = 16

# Fields of the OpenAI API (and common extensions) that cannot be honoured, with the values that
# ask for nothing. Clients send those by default, so they pass.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
# In messages these come back with a client's copy of an earlier answer, empty.
_EMPTY_IN_MESSAGES = ("annotations", "audio", "function_call", "name", "refusal", "tool_calls")


def _bad(message: str, param: str | None = None) -> PydanticCustomError:
    # The message goes in as context: pydantic would read braces in it as placeholders.
    return PydanticCustomError("api_field", "{message}", {"message": message, "param": param})


def _asks_for_nothing(field: str, value: object) -> bool:
    # False == 0 in Python, but "logprobs": 0 asks for the chosen tokens' and false for none.
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NOT_SUPPORTED[field]
    )


def _check_unicode(field: str, value: object) -> None:
    """Refuse unpaired surrogates anywhere: no answer or message that quotes one can be sent."""
    left = [field, value]
    while left:
        part = left.pop()
        if isinstance(part, str) and not is_unicode(part):
            name = field.encode(errors="backslashreplace").decode()  # it may be the name itself
            raise _bad(f"{name}: holds an unpaired surrogate, expected valid Unicode text", name)
        if isinstance(part, dict):
            left += [*part, *part.values()]
        elif isinstance(part, list):
            left += part


def _stop_list(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _bad("stop: must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _bad(f"stop: has {len(stops)} strings, at most {MAX_STOPS} are allowed")
    if not all(stops):
        raise _bad("stop: strings must not be empty")
    return stops


def _prompt_list(value: object) -> list[str | list[int]]:
    """One prompt or several, as text or token ids, always as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and _all_ids(value)):
        return [value]
    if isinstance(value, list) and value and all(isinstance(v, str) or _all_ids(v) for v in value):
        return value
    raise _bad("prompt: must be a string, a list of strings, token ids or lists of token ids")


def _all_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    )


def _text_content(value: object) -> str:
    """Message content as text; text parts are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _bad("content must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _bad("content parts must be {'type': 'text', 'text': ...}: only text is served")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise _bad("content parts must hold a string 'text' and nothing else")
        texts.append(part["text"])
    return "".join(texts)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_content)]

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {
            key: value
            for key, value in values.items()
            if key not in _EMPTY_IN_MESSAGES or value not in (None, [])
        }


class StreamOptions(_Strict):
    """What a stream carries beside text."""

    include_usage: bool = False


class GenerationRequest(_Strict):
    """Fields shared by both endpoints. null means the default, as in the OpenAI API."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0  # 0 and -1: off
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_list)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] = []
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Labels for the operator's own bookkeeping: they ask for nothing.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        kept = {}
        for key, value in values.items():
            _check_unicode(key, value)
            if key in cls.model_fields:
                if value is not None:
                    kept[key] = value
            elif key not in _NOT_SUPPORTED:
                near = difflib.get_close_matches(key, cls.model_fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise _bad(f"{key}: unknown field{hint}", key)
            elif not _asks_for_nothing(key, value):
                raise _bad(f"{key}: is not supported by this server; leave it out", key)
        return kept

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise _bad("stream_options: is only allowed with stream true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def token_limit(self) -> int | None:
        """Most tokens to generate; None for what fits."""
        return self.max_tokens

    def sampling(self, choice: int) -> SamplingParams:
        """Parameters of choice number `choice`: a seed moves on by one from choice to choice."""
        return SamplingParams(
            max_tokens=self.token_limit(),
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            seed=None if self.seed is None else self.seed + choice,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt_list)]

    @model_validator(mode="after")
    def _choices(self) -> "CompletionRequest":
        if self.n * len(self.prompt) > MAX_CHOICES:
            found = f"{self.n} times {len(self.prompt)} prompts"
            raise _bad(f"n: {found} is more than {MAX_CHOICES} choices", "n")
        return self


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise _bad(
                "max_completion_tokens: differs from max_tokens; give one", "max_completion_tokens"
            )
        return self

    def token_limit(self) -> int | None:
        """Most tokens to generate; None for what fits."""
        return self.max_completion_tokens or self.max_tokens
