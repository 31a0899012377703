"""Which tokens of a conversation the target itself would write: those alone are supervised.

An answer begins where the template's generation prompt ends, and ends with the end-of-turn token.
Template text after that token is never the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_train.data.drops import Unusable
from eagle3_train.data.read import Conversation, Message
from eagle3_train.data.template import ChatTemplate, Encoding

Span = tuple[int, int]  # [start, end) characters


@dataclass(frozen=True)
class Example:
    """One conversation as tokens."""

    where: str  # file:line
    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool: a token the target writes; not shifted


def to_example(row: Conversation, template: ChatTemplate) -> Example:
    """Render, encode and mask one conversation.

    Raises:
        Unusable: nothing would be supervised, or it cannot be masked with certainty.
    """
    if row.text is not None:
        ids, mask = _mask_text(row, template)
    else:
        text = _render_complete(row, template)
        mark = _mask_marked if template.marks_answers else _mask_differences
        ids, mask = mark(row, template, text)
    if not any(mask):
        raise Unusable("nothing in it is supervised")
    return Example(row.where, torch.tensor(ids), torch.tensor(mask))


def _render_complete(row: Conversation, template: ChatTemplate) -> str:
    """The rendered text, once it is sure that the template left nothing out."""
    if not any(message["role"] == "assistant" for message in row.messages):
        raise Unusable("no assistant turn")
    text = template.render(row.messages, tools=row.tools)
    at = 0
    for message in row.messages:
        content = message["content"].strip()  # templates may trim
        found = text.find(content, at)
        if found < 0:
            role = message["role"]
            raise Unusable(f"the chat template drops or rewrites the text of a {role} turn")
        at = found + len(content)
        if message.get("tool_calls"):
            _check_tool_calls(row, message, template, text)
    return text


def _check_tool_calls(
    row: Conversation, message: Message, template: ChatTemplate, text: str
) -> None:
    silent = [
        {k: v for k, v in m.items() if m is not message or k != "tool_calls"} for m in row.messages
    ]
    if template.render(silent, tools=row.tools) == text:
        raise Unusable("the chat template does not render tool_calls")


def _mask_differences(
    row: Conversation, template: ChatTemplate, text: str
) -> tuple[list[int], list[bool]]:
    """Each answer is what its render adds to the render of the turns before it."""
    turn = template.turn
    spans: list[Span] = []
    for i, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        before = template.render(row.messages[:i], tools=row.tools, open_answer=True)
        through = template.render(row.messages[: i + 1], tools=row.tools)
        if not text.startswith(through) or not through.startswith(before):
            raise Unusable("the chat template rewrites earlier turns")
        if not through.endswith(turn.ending + turn.tail):
            raise Unusable("the chat template ends an answer in an unusual way")
        spans.append((len(before), len(through) - len(turn.tail)))
    if row.finish_reason == "length" and row.messages[-1]["role"] == "assistant":
        text, spans = _cut_ending(text, spans, turn.ending)
    encoding = template.encode(text)
    return encoding.ids, _tokens_in(encoding, spans)


def _mask_marked(
    row: Conversation, template: ChatTemplate, text: str
) -> tuple[list[int], list[bool]]:
    """The template's own markers, corrected to end with the end-of-turn token."""
    encoding = template.encode(text)
    mask = template.marked(row.messages, row.tools)
    ids = encoding.ids
    if len(mask) != len(ids):
        raise Unusable("the chat template renders differently with its generation markers")
    ending = set(template.encode(template.turn.ending).ids[-1:])
    for start, end in _runs(mask):
        inside = [i for i in range(start, end) if ids[i] in ending]
        if inside:
            mask[inside[-1] + 1 : end] = [False] * (end - inside[-1] - 1)
        elif end < len(ids) and ids[end] in ending:
            mask[end] = True
    if row.finish_reason == "length" and row.messages[-1]["role"] == "assistant" and any(mask):
        last = len(mask) - mask[::-1].index(True)
        kept = last - 1 if ids[last - 1] in ending else last
        ids, mask = ids[:kept], mask[:kept]
    return ids, mask


def _mask_text(row: Conversation, template: ChatTemplate) -> tuple[list[int], list[bool]]:
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
    if row.finish_reason == "length" and spans and text[: spans[-1][1]].endswith(turn.ending):
        text, spans = _cut_ending(text, spans, turn.ending)
    if not spans:
        raise Unusable(f"nothing in it is supervised: {turn.opening.strip()!r} is not in the text")
    encoding = template.encode(text)
    return encoding.ids, _tokens_in(encoding, spans)


def _cut_ending(text: str, spans: list[Span], ending: str) -> tuple[str, list[Span]]:
    """End the text where a length-limited answer ends: the target never wrote the ending."""
    start, end = spans[-1]
    end -= len(ending)
    return text[:end], [*spans[:-1], (start, end)]


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


def _runs(mask: Sequence[bool]) -> list[Span]:
    padded = [False, *mask, False]
    edges = [i for i in range(len(mask) + 1) if padded[i] != padded[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))
