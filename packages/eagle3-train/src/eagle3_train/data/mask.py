"""Which tokens of a row the target itself would write: those alone are supervised.

An answer begins where the template's generation prompt ends, and ends with the end-of-turn token.
Template text after that token is never the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_train.data.drops import Unusable
from eagle3_train.data.read import Conversation
from eagle3_train.data.template import ChatTemplate, Encoding
from eagle3_train.data.turns import Rendered, Span, render_answers


@dataclass(frozen=True)
class Example:
    """One text as tokens."""

    where: str  # file:line, and the part of a row that became several
    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool: a token the target writes; not shifted


def to_examples(row: Conversation, template: ChatTemplate) -> list[Example]:
    """Render, encode and mask one row; several examples where the template rewrites history.

    Raises:
        Unusable: nothing would be supervised, or it cannot be masked with certainty.
    """
    if row.tokens is not None:
        return [_given(row, template)]
    texts = [_marked_text(row, template)] if row.text is not None else render_answers(row, template)
    examples: list[Example] = []
    for number, rendered in enumerate(texts, 1):
        encoding = template.encode(rendered.text)
        mask = torch.tensor(_tokens_in(encoding, rendered.spans))
        where = row.where if len(texts) == 1 else f"{row.where} (part {number})"
        if mask.any():
            examples.append(Example(where, torch.tensor(encoding.ids), mask))
    if not examples:
        raise Unusable("nothing in it is supervised")
    return examples


def _given(row: Conversation, template: ChatTemplate) -> Example:
    """Token ids that came as such; they must at least be ids of this tokenizer."""
    assert row.tokens is not None
    ids, mask = (torch.tensor(values) for values in row.tokens)
    size = len(template.tokenizer)
    if (unknown := (ids < 0) | (ids >= size)).any():
        at = int(unknown.nonzero()[0])
        raise Unusable(f"input_ids[{at}] is {int(ids[at])}, the tokenizer knows ids below {size}")
    if not mask.any():
        raise Unusable("nothing in it is supervised")
    return Example(row.where, ids, mask)


def _marked_text(row: Conversation, template: ChatTemplate) -> Rendered:
    """Preformatted text: answers stand between the template's own opening and end-of-turn."""
    assert row.text is not None
    turn = template.turn
    if not turn.opening.strip() or not turn.ending:
        raise Unusable("preformatted, but the chat template has no marks around answers to find")
    text = template.with_template_bos(row.text)
    spans: list[Span] = []
    at = text.find(turn.opening)
    while at >= 0:
        start = at + len(turn.opening)
        at = text.find(turn.opening, start)
        end = text.find(turn.ending, start)
        if end < 0 <= at or 0 <= at < end:
            raise Unusable("an answer begins before the one before it ends")
        spans.append((start, end + len(turn.ending) if end >= 0 else len(text)))
    if not spans:
        raise Unusable(f"nothing in it is supervised: {turn.opening.strip()!r} is not in the text")
    rendered = Rendered(text, tuple(spans), turn.ending)
    ended = text[: spans[-1][1]].endswith(turn.ending)
    return rendered.cut() if row.finish_reason == "length" and ended else rendered


def _tokens_in(encoding: Encoding, spans: Sequence[Span]) -> list[bool]:
    """Tokens that lie wholly in a span; one that straddles an edge is partly the prompt's."""
    mask: list[bool] = []
    remaining = list(spans)
    for start, end in encoding.offsets:
        while remaining and start >= remaining[0][1]:
            remaining.pop(0)
        mask.append(
            bool(remaining) and start < end and remaining[0][0] <= start and end <= remaining[0][1]
        )
    return mask
