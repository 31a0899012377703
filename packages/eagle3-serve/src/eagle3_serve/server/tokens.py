"""Single tokens as the API shows them: with logprobs, and with how they came to be."""

import codecs
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3_serve.detokenize import TokenBytes
from eagle3_serve.verify import RoundTrace, TokenLogprobs


class TokenTexts:
    """A token's bytes and text by itself; special tokens, which add no text, by their name."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer` must not be in use on another thread."""
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)

    def raw(self, token_id: int) -> bytes:
        """Bytes that the token adds to the text."""
        return self._bytes[token_id]

    def named(self, token_id: int) -> bytes:
        """Its bytes, or its name if it has none."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        return self.raw(token_id) or (name.encode() if isinstance(name, str) else b"")

    def text(self, token_id: int) -> str:
        """As text, with replacement characters where it is not whole ones."""
        return self.named(token_id).decode(errors="replace")


class TokenRecord:
    """One output's tokens in the order they come, for one response."""

    def __init__(self, texts: TokenTexts) -> None:
        """Before the first token."""
        self._texts = texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pieces = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`logprobs` of a chat choice."""
        content = [
            self._entry(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._entry(i, value) for i, value in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def completion(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`logprobs` of a completion choice; offsets count characters of the completion."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(self._texts.raw(entry.token_id)))
        text = self._texts.text
        return {
            "tokens": [text(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{text(i): value for i, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def round(self, trace: RoundTrace, token_ids: Sequence[int]) -> dict[str, Any]:
        """What a round drafted and emitted; characters come whole, with their last byte."""
        drafts = zip(trace.token_ids, trace.parents, strict=True)
        num_accepted = len(trace.accepted)
        beyond = "bonus" if trace.token_ids else "target"
        return {
            "drafts": [
                {
                    "token_id": token_id,
                    "text": self._texts.text(token_id),
                    "parent": parent,
                    "accepted": place in trace.accepted,
                }
                for place, (token_id, parent) in enumerate(drafts)
            ],
            "tokens": [
                {
                    "token_id": token_id,
                    "text": self._pieces.decode(self._texts.raw(token_id)),
                    "source": "draft" if depth <= num_accepted else beyond,
                    "depth": depth if depth <= num_accepted else 0,
                }
                for depth, token_id in enumerate(token_ids, 1)
            ],
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        named = self._texts.named(token_id)
        return {
            "token": named.decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(named),
        }
