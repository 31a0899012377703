"""Output that has to match a JSON schema, a regular expression or a grammar (llguidance).

A verify row may only choose what the grammar allows behind the row's own path, so each row has a
mask of its own: the matcher walks the path, says what may follow, and is rolled back.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eagle3_core import UserError


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of documents that a JSON schema allows; `{"type": "object"}` is any object."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def regex_grammar(pattern: str) -> str:
    """The grammar of texts that a regular expression (Rust syntax) matches as a whole."""
    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of a few fixed texts."""
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def lark_grammar(text: str) -> str:
    """A context-free grammar in llguidance's variant of Lark."""
    return LLMatcher.grammar_from_lark(text)


class Constraint:
    """One request's position in its grammar. Made by `Grammars.start`."""

    def __init__(self, matcher: LLMatcher) -> None:
        """`matcher` stands behind the certain tokens of the output, so far none."""
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether the output matches and nothing can be added to it."""
        return self._matcher.is_stopped()

    def advance(self, token_id: int) -> None:
        """A token of the output is now certain."""
        if not self._matcher.consume_token(token_id):
            raise RuntimeError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}")

    def mask(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Bar, in place, what may not follow each row's path; logits [R,V].

        A row behind a path that the grammar does not allow stays as it is: it is never chosen.
        """
        allowed = torch.full((len(paths), (logits.shape[1] + 31) // 32), -1, dtype=torch.int32)
        for row, path in zip(allowed, paths, strict=True):
            taken = self._matcher.try_consume_tokens(list(path))
            if taken == len(path):
                self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.nbytes)
            self._matcher.rollback(taken)
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}")
        bits = torch.arange(32, dtype=torch.int32)
        barred = (allowed.unsqueeze(2) >> bits & 1).flatten(1)[:, : logits.shape[1]] == 0
        logits.masked_fill_(barred.to(logits.device), -torch.inf)


class Grammars:
    """Grammars over the tokens of one target, compiled once each."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """Cheap: the tokenizer is read when the first grammar comes."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = [i for i in eos_token_ids if i < min(len(tokenizer), vocab_size)]
        self._compiled = lru_cache(maxsize=64)(self._compile)
        self._tokens: LLTokenizer | None = None

    def check(self, grammar: str) -> None:
        """Compile a grammar; may take a second, and then `start` does not.

        Raises:
            UserError: it is invalid, or uses what is not supported; says what.
        """
        self._compiled(grammar)

    def start(self, grammar: str) -> Constraint:
        """A constraint for a new output.

        Raises:
            UserError: as `check`.
        """
        return Constraint(self._compiled(grammar).deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        tokens = self._read_tokens()
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokens)
        if failed:
            raise UserError(_one_line(messages[0]))
        matcher = LLMatcher(tokens, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(_one_line(matcher.get_error()))
        return matcher

    def _read_tokens(self) -> LLTokenizer:
        if self._tokens is None:
            tokenizer = self._tokenizer
            if not isinstance(tokenizer, PreTrainedTokenizerFast):
                kind = type(tokenizer).__name__
                raise UserError(f"grammars need a fast tokenizer, the target has a {kind}")
            if len(tokenizer) > self._vocab_size:
                raise UserError(
                    f"grammars need a tokenizer within the target's {self._vocab_size} ids, "
                    f"this one has {len(tokenizer)}"
                )
            if not self._eos:
                raise UserError("grammars need a target with an end token, this one names none")
            self._tokens = from_tokenizer(tokenizer, self._vocab_size, self._eos)
        return self._tokens


def _one_line(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= 300 else text[:297] + "..."
