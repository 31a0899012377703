"""Bytes of single tokens, so that text can be built token by token at linear cost.

Decoding each new token by itself loses characters that span tokens, and decoding a growing window
costs more with every token and changes its mind about invalid bytes. Bytes do neither: they append,
and an incremental UTF-8 decoder says exactly which of them are still incomplete.
"""

import re
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps a token id to the bytes it adds to the text; special tokens add none.

    Byte-level tokenizers (GPT-2, Llama 3, Qwen, ...) are mapped through their byte alphabet and
    byte-fallback pieces (`<0xF0>` in SentencePiece vocabularies) through their number. Any other
    piece is the text it adds behind another token, so a leading space is kept: the output
    continues the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find out which family the tokenizer belongs to; tokens are looked up when first seen."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        # A probe rather than a type: the byte-level decoder may sit inside a sequence of others.
        self._byte_level = decoder is not None and decoder.decode(["ĠĊ"]) == " \n"
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of a token; empty for special tokens and for ids the tokenizer does not have."""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str) or not self._decode(token_id):
            return b""
        if self._byte_level:
            return _byte_level(token)
        if match := _BYTE_FALLBACK.fullmatch(token):
            return bytes([int(match[1], 16)])
        alone = self._decode(token_id)
        return self._decode(token_id, token_id)[len(alone) :].encode(errors="replace")

    def _decode(self, *token_ids: int) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text


@lru_cache(maxsize=4)
def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """The table of a tokenizer, shared by all requests."""
    return TokenBytes(tokenizer)


def _byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    if all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return token.encode()  # an added token, stored as plain text


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's invertible map: printable Latin-1 stands for itself, the rest follows from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
