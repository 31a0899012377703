"""Request bodies: what of the OpenAI API is honoured, and a 400 for everything that is not."""

import difflib
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from eagle3_serve.prompts import is_unicode
from eagle3_serve.sampling import SamplingParams
from eagle3_serve.server.messages import Message
from eagle3_serve.server.schema import ResponseFormat, Strict, StructuredOutputs, bad
from eagle3_serve.server.tools import Tool, forced_call_grammar, tool_name

MAX_CHOICES = 128  # per request: n times the number of prompts
MAX_STOPS = 16

# Fields of the OpenAI API (and common extensions) that cannot be honoured, with the values that
# ask for nothing. Clients send those by default, so they pass.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
MAX_ALTERNATIVES = 20  # logprobs per token


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
            raise bad(f"{name}: holds an unpaired surrogate, expected valid Unicode text", name)
        if isinstance(part, dict):
            left += [*part, *part.values()]
        elif isinstance(part, list):
            left += part


def _stop_list(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad("stop: must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise bad(f"stop: has {len(stops)} strings, at most {MAX_STOPS} are allowed")
    if not all(stops):
        raise bad("stop: strings must not be empty")
    return stops


def _prompt_list(value: object) -> list[str | list[int]]:
    """One prompt or several, as text or token ids, always as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and _all_ids(value)):
        return [value]
    if isinstance(value, list) and value and all(isinstance(v, str) or _all_ids(v) for v in value):
        return value
    raise bad("prompt: must be a string, a list of strings, token ids or lists of token ids")


def _all_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    )


def _bias_pairs(value: object) -> list[tuple[int, float]]:
    """OpenAI's object of token id -> bias, as pairs."""
    if not isinstance(value, dict):
        raise bad("logit_bias: must be an object of token ids and numbers")
    pairs = []
    for key, bias in value.items():
        if not isinstance(key, str) or not key.isdecimal():
            raise bad(f"logit_bias: {key!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise bad(f"logit_bias: {key} is {bias!r}, expected a number from -100 to 100")
        pairs.append((int(key), float(bias)))
    return pairs


class StreamOptions(Strict):
    """What a stream carries beside text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # of vLLM and SGLang: the counts so far in every chunk

    @model_validator(mode="after")
    def _usage_is_wanted(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise bad("stream_options: continuous_usage_stats is only allowed with include_usage")
        return self


class GenerationRequest(Strict):
    """Fields shared by both endpoints. null means the default, as in the OpenAI API."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    logit_bias: Annotated[list[tuple[int, float]], BeforeValidator(_bias_pairs)] = Field(
        default_factory=list
    )
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_list)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_rounds: bool = False
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
                raise bad(f"{key}: unknown field{hint}", key)
            elif not _asks_for_nothing(key, value):
                raise bad(f"{key}: is not supported by this server; leave it out", key)
        return kept

    @model_validator(mode="after")
    def _one_grammar(self) -> "GenerationRequest":
        field, grammar = self.grammar()
        if self.response_format and self.structured_outputs:
            raise bad("structured_outputs: is given beside response_format; give one", field)
        if grammar is not None:
            for name, asked in (("min_tokens", self.min_tokens), ("ignore_eos", self.ignore_eos)):
                if asked:
                    raise bad(f"{name}: has no meaning with {field}; leave it out", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise bad(f"min_tokens: is above max_tokens, {self.max_tokens}", "min_tokens")
        return self

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options: is only allowed with stream true", "stream_options")
        return self

    def token_limit(self) -> int | None:
        """Most tokens to generate; None for what fits."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """Alternatives to give with each token's logprob; None for no logprobs at all."""
        return None

    def grammar(self) -> tuple[str, str | None]:
        """The field that asks for a grammar, and the grammar; None for free text."""
        if self.structured_outputs is not None:
            return "structured_outputs", self.structured_outputs.grammar_text()
        if self.response_format is not None:
            return "response_format", self.response_format.grammar_text()
        return "response_format", None

    def sampling(self, choice: int) -> SamplingParams:
        """Parameters of choice number `choice`: a seed moves on by one from choice to choice."""
        return SamplingParams(
            max_tokens=self.token_limit(),
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            logit_bias=tuple(self.logit_bias),
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed is None else self.seed + choice,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            grammar=self.grammar()[1],
            logprobs=self.num_logprobs(),
            trace=self.return_rounds,
        )


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt_list)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    echo: bool = False

    @model_validator(mode="before")
    @classmethod
    def _no_logprobs(cls, values: object) -> object:
        """Chat's way to ask for none; elsewhere false is no number."""
        if isinstance(values, dict) and values.get("logprobs") is False:
            return {key: value for key, value in values.items() if key != "logprobs"}
        return values

    @model_validator(mode="after")
    def _echo_is_text_alone(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise bad("logprobs: not with echo: the prompt's own are not computed", "logprobs")
        return self

    def num_logprobs(self) -> int | None:
        """As asked."""
        return self.logprobs

    @model_validator(mode="after")
    def _choices(self) -> "CompletionRequest":
        if self.n * len(self.prompt) > MAX_CHOICES:
            found = f"{self.n} times {len(self.prompt)} prompts"
            raise bad(f"n: {found} is more than {MAX_CHOICES} choices", "n")
        return self


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] = 0
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Annotated[str, BeforeValidator(tool_name)] = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        limit = self.max_completion_tokens
        if None not in (self.max_tokens, limit) and self.max_tokens != limit:
            raise bad(
                "max_completion_tokens: differs from max_tokens; give one", "max_completion_tokens"
            )
        if limit is not None and self.min_tokens > limit:
            raise bad(f"min_tokens: is above max_completion_tokens, {limit}", "min_tokens")
        if self.top_logprobs and not self.logprobs:
            raise bad("top_logprobs: is only allowed with logprobs true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _tools_fit(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise bad("tools: two have the same name", "tools")
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise bad("tool_choice: asks for a call, but there are no tools", "tool_choice")
        if self.tool_choice not in ("none", "auto", "required", *names):
            raise bad(f"tool_choice: {self.tool_choice!r} is none of the tools", "tool_choice")
        if self.forces_tool and (self.response_format or self.structured_outputs):
            raise bad("tool_choice: forces a call, which response_format cannot shape too")
        return self

    @property
    def forces_tool(self) -> bool:
        """Whether the answer has to be a tool call."""
        return bool(self.tools) and self.tool_choice not in ("none", "auto")

    def token_limit(self) -> int | None:
        """Most tokens to generate; None for what fits."""
        return self.max_completion_tokens or self.max_tokens

    def num_logprobs(self) -> int | None:
        """As asked."""
        return self.top_logprobs if self.logprobs else None

    def grammar(self) -> tuple[str, str | None]:
        """As for both endpoints; a call that is forced has one too."""
        if self.forces_tool:
            return "tools", forced_call_grammar(
                self.tools, self.tool_choice, self.parallel_tool_calls
            )
        return super().grammar()
