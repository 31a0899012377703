"""OutputStream: what ends an output, what text it has, and what may be shown before the end."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eagle3_serve.detokenize import TokenBytes
from eagle3_serve.sampling import SamplingParams
from eagle3_serve.stop import OutputStream

EOS, END_OF_TURN, THINK = 256, 257, 258


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; 256 and 257 are special, 258 is an added token that is text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=True) for t in ("<|eos|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(" <think>\n", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """The decoder of Llama 2: a mark for spaces, byte fallback, the first space stripped."""
    pieces = ["▁Hello", "▁world", "ly", *(f"<0x{b:02X}>" for b in range(256)), "<unk>"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZER = byte_level_tokenizer()
EOS_IDS = (EOS, END_OF_TURN)


def replay(token_ids: list[int] | bytes, **params: object) -> tuple[OutputStream, list[str]]:
    """Push until the output ends; returns it and the text deltas seen on the way."""
    stream = OutputStream(TOKENIZER, SamplingParams(**params), EOS_IDS)  # type: ignore[arg-type]
    deltas = []
    for token_id in token_ids:
        ended = stream.push(token_id)
        deltas.append(stream.take_text())
        if ended:
            break
    return stream, deltas


class TestEnds:
    @pytest.mark.parametrize(
        ("stop", "text", "tokens"),
        [
            (("ij",), "gh", 4),
            (("ghijklmnop",), "", 10),
            (("ij", "h"), "g", 2),
            (("jk", "ijk"), "gh", 5),  # complete on the same token: the longer one is cut
            (("ghijZ", "i"), "gh", 3),  # an earlier start that never completes does not count
        ],
    )
    def test_stop_string_is_cut_whole_and_keeps_its_tokens(
        self, stop: tuple[str, ...], text: str, tokens: int
    ) -> None:
        stream, deltas = replay(b"ghijklmnopqrst", stop=stop)
        assert stream.text == "".join(deltas) == text
        assert stream.token_ids == list(b"ghijklmnopqrst"[:tokens])
        assert stream.finish_reason == "stop"

    @pytest.mark.parametrize("eos", EOS_IDS)
    def test_every_end_id_ends_the_output_and_adds_no_text(self, eos: int) -> None:
        stream, _ = replay([*b"6789", eos, ord("A")])
        assert (stream.text, stream.token_ids) == ("6789", [*b"6789", eos])
        assert stream.finish_reason == "stop"

    def test_ignore_eos_runs_on_to_the_limit(self) -> None:
        stream, _ = replay([*b"3456789", EOS, *b"ABCDE"], ignore_eos=True, max_tokens=12)
        assert (stream.text, len(stream.token_ids)) == ("3456789ABCD", 12)
        assert stream.finish_reason == "length"

    def test_stop_token_id_adds_no_text_and_works_with_ignore_eos(self) -> None:
        stream, _ = replay(b"defg", stop_token_ids=(101,), ignore_eos=True)
        assert (stream.text, stream.token_ids, stream.finish_reason) == ("d", [100, 101], "stop")

    def test_stop_beats_the_length_limit_on_the_same_token(self) -> None:
        assert replay([*b"67", EOS], max_tokens=3)[0].finish_reason == "stop"
        assert replay(b"ghij", stop=("ij",), max_tokens=4)[0].finish_reason == "stop"

    def test_limit_shows_the_beginning_of_a_stop_string(self) -> None:
        stream, deltas = replay(b"ghi", stop=("ij",), max_tokens=3)
        assert deltas == ["g", "h", "i"]
        assert stream.finish_reason == "length"

    def test_finish_releases_what_is_held_when_a_request_is_aborted(self) -> None:
        stream, deltas = replay(b"ghi", stop=("ij",))
        assert (deltas, stream.finish_reason) == (["g", "h", ""], None)
        stream.finish()
        assert stream.take_text() == "i"
        assert stream.text == "ghi"

    def test_pushing_after_the_end_is_a_bug(self) -> None:
        stream, _ = replay([EOS])
        with pytest.raises(AssertionError):
            stream.push(100)

    def test_random_text_stops_where_reading_characters_says(self) -> None:
        """An independent scan, one character at a time, over texts rich in near misses."""
        rng = random.Random(0)
        for _ in range(300):
            text = "".join(rng.choices("ab", k=20))
            stops = tuple("".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(3))
            end = next((i for i in range(1, 21) if text[:i].endswith(stops)), None)
            stream, deltas = replay(text.encode(), stop=stops, max_tokens=20)
            assert "".join(deltas) == stream.text
            if end is None:
                assert (stream.text, stream.finish_reason) == (text, "length")
            else:
                cut = max(len(stop) for stop in stops if text[:end].endswith(stop))
                assert stream.text == text[: end - cut]
                assert (len(stream.token_ids), stream.finish_reason) == (end, "stop")


class TestText:
    def test_characters_across_tokens_come_whole(self) -> None:
        stream, deltas = replay("😀é😀".encode(), max_tokens=10)
        assert [d for d in deltas if d] == ["😀", "é", "😀"]
        assert stream.text == "😀é😀"

    def test_incomplete_tail_is_dropped_in_both_modes(self) -> None:
        stream, deltas = replay("😀😀".encode(), max_tokens=6)
        assert "".join(deltas) == stream.text == "😀"
        assert stream.finish_reason == "length"

    def test_invalid_bytes_never_hold_more_than_three(self) -> None:
        """The first bytes of a four-byte character, over and over, are shown as they break."""
        broken = "😀".encode()[:3] * 40
        stream, deltas = replay(broken)
        behind = [3 * "".join(deltas[: i + 1]).count("\ufffd") for i in range(len(deltas))]
        assert all(i + 1 - seen <= 4 for i, seen in enumerate(behind))
        assert set(stream.text) == {"\ufffd"}

    @pytest.mark.parametrize("seed", range(20))
    def test_text_equals_the_tokenizers_own_decoding(self, seed: int) -> None:
        rng = random.Random(seed)
        text = "".join(rng.choices("aé€😀 \n\ufffd", k=30))
        ids = [*text.encode(), THINK, EOS, *text.encode()]
        stream, _ = replay(ids, ignore_eos=True)
        assert stream.text == TOKENIZER.decode(ids, skip_special_tokens=True)
        assert stream.text == text + " <think>\n" + text

    def test_ids_outside_the_tokenizer_add_nothing(self) -> None:
        stream, _ = replay([ord("a"), 300, ord("b")])
        assert (stream.text, stream.token_ids) == ("ab", [97, 300, 98])

    def test_only_new_text_is_taken(self) -> None:
        stream, _ = replay(b"ab")
        assert stream.take_text() == ""
        stream.push(ord("c"))
        assert (stream.take_text(), stream.text) == ("c", "abc")

    def test_each_token_is_looked_up_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Cost per token does not grow with the output: the tokenizer is asked once an id."""
        asked: list[int] = []
        monkeypatch.setattr(TokenBytes, "_look_up", lambda _, i: asked.append(i) or b"x")
        table = TokenBytes(TOKENIZER)
        assert b"".join(table[i] for i in (5, 5, 7, 5)) == b"xxxx"
        assert asked == [5, 7]


def test_sentencepiece_keeps_leading_space_and_joins_byte_fallback() -> None:
    table = TokenBytes(sentencepiece_tokenizer())
    first_byte = 3
    ids = [0, 1, 2, *(first_byte + b for b in "😀".encode())]
    assert b"".join(table[i] for i in ids).decode() == " Hello worldly😀"
