"""Output under a grammar: always valid, and the same tokens with a draft as without."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle3_core import UserError, load_draft
from eagle3_core.target import load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.constraints import (
    Grammars,
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate
from eagle3_serve.sampling import SamplingParams

V = 272
EOS, IM_END = 257, 259


@pytest.fixture(scope="module")
def grammars(make_tokenizer: Callable[..., Any]) -> Grammars:
    return Grammars(make_tokenizer(), V, (EOS, IM_END))


def allowed(row: torch.Tensor) -> str:
    """The bytes that a row may choose, "$" for an end token."""
    ids = (row > -torch.inf).nonzero()[:, 0].tolist()
    return "".join(chr(i) if i < 256 else "$" for i in ids)


def masked(grammars: Grammars, grammar: str, certain: str, *paths: str) -> list[str]:
    constraint = grammars.start(grammar)
    for byte in certain.encode():
        constraint.advance(byte)
    logits = torch.zeros(len(paths), V)
    constraint.mask(logits, [list(path.encode()) for path in paths])
    again = torch.zeros(len(paths), V)
    constraint.mask(again, [list(path.encode()) for path in paths])
    assert torch.equal(logits, again)  # the position is where it was
    return [allowed(row) for row in logits]


def test_rows_of_a_tree_are_masked_behind_their_own_paths(grammars: Grammars) -> None:
    grammar = regex_grammar("(ab|ac|b)d?")
    rows = masked(grammars, grammar, "", "", "a", "b", "ab", "ac", "abd")
    assert rows == ["ab", "bc", "d$$", "d$$", "d$$", "$$"]
    assert masked(grammars, grammar, "a", "", "b", "c", "bd") == ["bc", "d$$", "d$$", "$$"]


def test_a_row_behind_what_is_not_allowed_is_left_alone(grammars: Grammars) -> None:
    rows = masked(grammars, regex_grammar("abc"), "a", "", "x", "b", "bx", "bc")
    assert (rows[0], rows[2]) == ("b", "c")
    assert len(rows[1]) == len(rows[3]) == V


def test_a_grammar_is_complete_when_nothing_can_be_added(grammars: Grammars) -> None:
    fixed, open_ended = grammars.start(regex_grammar("ab")), grammars.start(regex_grammar("ab*"))
    for byte in b"ab":
        assert not fixed.is_complete
        fixed.advance(byte)
        open_ended.advance(byte)
    assert fixed.is_complete
    assert not open_ended.is_complete


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (json_schema_grammar({"type": "frob"}), "Invalid type: frob"),
        (json_schema_grammar({"not": {}}), "Unimplemented keys"),
        (json_schema_grammar({"$ref": "#/nowhere"}), "does not exist"),
        (json_schema_grammar({"type": "integer", "minimum": 5, "maximum": 2}), "Unsatisfiable"),
        (regex_grammar("("), "unclosed group"),
        (regex_grammar("(?=x)"), "look-around"),
        (lark_grammar("start: nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(
    grammars: Grammars, grammar: str, words: str
) -> None:
    with pytest.raises(UserError, match=words) as error:
        grammars.check(grammar)
    assert "\n" not in str(error.value)


def test_a_target_without_an_end_token_takes_no_grammar(make_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="end token"):
        Grammars(make_tokenizer(), V, ()).check(regex_grammar("a"))
    with pytest.raises(UserError, match="within the target's 100 ids"):
        Grammars(make_tokenizer(), 100, (1,)).check(regex_grammar("a"))


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "size": {"enum": ["small", "large"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


def is_document(text: str) -> bool:
    """Whether a text is a document of SCHEMA."""
    value = json.loads(text)
    return (
        set(value) == {"name", "size", "tags"}
        and len(value["name"]) <= 4
        and value["size"] in ("small", "large")
        and 1 <= len(value["tags"]) <= 2
        and all(isinstance(tag, bool) for tag in value["tags"])
    )


def test_with_a_draft_the_output_is_valid_and_that_of_plain_decoding(pairs: Any) -> None:
    target = pairs.target(vocab_size=V, max_position_embeddings=512)
    draft = pairs.draft(target, max_position_embeddings=512)
    grammar = json_schema_grammar(SCHEMA)
    regex = r"[a-f]{3,8}-(yes|no)"
    jobs: list[tuple[SamplingParams, Callable[[str], Any]]] = [
        (SamplingParams(grammar=grammar, max_tokens=300, temperature=0.0), is_document),
        (SamplingParams(grammar=grammar, max_tokens=300, seed=1), is_document),
        (SamplingParams(grammar=grammar, max_tokens=300, seed=2, top_k=3), is_document),
        (
            SamplingParams(
                grammar=regex_grammar(regex),
                max_tokens=20,
                seed=3,
                presence_penalty=1.0,
                logit_bias=((ord("c"), 4.0),),
            ),
            lambda text: re.fullmatch(regex, text),
        ),
        (
            SamplingParams(grammar=choice_grammar(["left", 'ri"ght']), seed=4, max_tokens=20),
            lambda text: text in ("left", 'ri"ght'),
        ),
    ]
    params = [own for own, _ in jobs]
    prompts = [[7 + i, 3] for i in range(len(jobs))]
    plain_config = EngineConfig(num_speculative_tokens=0, max_model_len=400)
    plain = generate(Engine(target, None, plain_config), prompts, params)[0]
    assert [output.finish_reason for output in plain] == ["stop"] * len(jobs)
    for output, (_, is_valid) in zip(plain, jobs, strict=True):
        assert is_valid(output.text), output.text
    for topk in (1, 2):
        config = EngineConfig(
            num_speculative_tokens=3, topk=topk, max_model_len=400, max_batch_size=4
        )
        assert generate(Engine(target, draft, config), prompts, params)[0] == plain


def test_the_chain_stays_within_the_grammar_and_drafts_are_still_kept(chain_pair: Any) -> None:
    """Greedy 'g', 'h', ... up to where the pattern asks for a digit: then 0, and the end."""

    target = load_target(chain_pair.target)
    engine = Engine(target, load_draft(chain_pair.draft, target).draft, EngineConfig())
    params = SamplingParams(grammar=regex_grammar("[g-p]{6}[0-9]"), temperature=0, max_tokens=30)
    outputs, figures = generate(engine, [[ord("f")]], params)
    assert outputs[0].text[:6] == "ghijkl"
    assert outputs[0].text[6] in "0123456789"
    assert (len(outputs[0].token_ids), outputs[0].finish_reason) == (7, "stop")
    assert figures["num_accepted_tokens"] >= 3
