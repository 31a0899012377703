"""The answers of a conversation, each in a text that begins with the prompt it answers.

A server renders the turns so far, and the target goes on from there. Templates change what they
show of a turn once others follow: they strip its thinking (Qwen3, DeepSeek), or end it with another
token (gpt-oss). So each answer is looked at as the last turn of its own render. Where the next
render begins with this one, both answers share a text; where it does not, a new text begins and
the answers before it are unsupervised history in it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eagle3_train.data.drops import Unusable
from eagle3_train.data.read import Conversation, Message
from eagle3_train.data.template import ChatTemplate

Span = tuple[int, int]  # [start, end) characters

_THINK_END = "</think>"
_THINK_BEGIN = re.compile(r"\s*<think>\n?")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # keys that templates read


@dataclass(frozen=True)
class Rendered:
    """A text and what the target writes in it."""

    text: str
    spans: tuple[Span, ...]
    ending: str  # the end-of-turn that closes the last span; "" where there is none

    def cut(self) -> "Rendered":
        """Without the last end-of-turn and all after it: a length-limited answer never had one."""
        *earlier, (start, end) = self.spans
        end -= len(self.ending)
        return Rendered(self.text[:end], (*earlier, (start, end)), "")


def render_answers(row: Conversation, template: ChatTemplate) -> list[Rendered]:
    """All answers of a conversation, in as few texts as their prompts allow.

    Raises:
        Unusable: the template loses something of the conversation, or it is not certain which part
            of the text the target writes.
    """
    if not any(message["role"] == "assistant" for message in row.messages):
        raise Unusable("no assistant turn")
    whole = template.render(row.messages, tools=row.tools)
    _check_asked(row.messages, whole)
    texts: list[Rendered] = []
    for i, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        answer = _answer(row, i, template)
        if texts and answer.text.startswith(texts[-1].text):
            answer = replace(answer, spans=texts.pop().spans + answer.spans)
        texts.append(answer)
    if whole.startswith(texts[-1].text):
        texts[-1] = replace(texts[-1], text=whole)  # what was asked last stays, unanswered
    if row.finish_reason == "length" and row.messages[-1]["role"] == "assistant":
        texts[-1] = texts[-1].cut()
    return texts


def _check_asked(messages: Sequence[Message], text: str) -> None:
    """What the target is told has to be there, in order; of answers see `_answer`."""
    at = 0
    for message in messages:
        content = message["content"].strip()  # templates may trim
        found = text.find(content, at)
        if found >= 0:
            at = found + len(content)
        elif message["role"] != "assistant":
            role = message["role"]
            raise Unusable(f"the chat template drops or rewrites the text of a {role} turn")


def _answer(row: Conversation, i: int, template: ChatTemplate) -> Rendered:
    """The conversation through its turn i, an answer."""
    message = row.messages[i]
    before = template.render(row.messages[:i], tools=row.tools, open_answer=True)
    through = template.render(row.messages[: i + 1], tools=row.tools)
    if message.get("tool_calls"):
        _check_tool_calls(row, i, template, through)
    opened = through.startswith(before)
    start = len(before)
    if template.marks_answers or not opened:
        asked = template.render(row.messages[:i], tools=row.tools)
        if not through.startswith(asked):
            raise Unusable("the chat template rewrites earlier turns with each answer")
        start = len(asked)
    shown, content = through[start:], message["content"].strip()
    if content not in shown:
        return _spelled_out(message, before, shown, template)
    for key in _REASONING:
        reasoning = message.get(key)
        if isinstance(reasoning, str) and reasoning.strip() not in shown:
            raise Unusable(f"the chat template does not render the {key} of an answer")
    if template.marks_answers:
        return _marked(row, i, through, start, template)
    if not opened:
        raise Unusable("the chat template opens an answer otherwise than it renders it")
    end = _end_of_answer(through, start, template)
    return Rendered(through, ((start, end),), _ending(through[:end], template))


def _check_tool_calls(row: Conversation, i: int, template: ChatTemplate, through: str) -> None:
    silent = {key: value for key, value in row.messages[i].items() if key != "tool_calls"}
    if template.render([*row.messages[:i], silent], tools=row.tools) == through:
        raise Unusable("the chat template does not render tool_calls")


def _spelled_out(message: Message, before: str, shown: str, template: ChatTemplate) -> Rendered:
    """An answer of which the template shows the part after its thinking: put back as written.

    A prompt that opens the thinking itself has its opening already.
    """
    content = message["content"]
    answer = content.rpartition(_THINK_END)[2].strip()
    ending = template.turn.ending
    if _THINK_END not in content or answer not in shown or message.get("tool_calls") or not ending:
        raise Unusable("the chat template drops or rewrites the text of an assistant turn")
    if before.rstrip().endswith("<think>"):
        content = _THINK_BEGIN.sub("", content, count=1) if _THINK_BEGIN.match(content) else content
    end = len(before) + len(content) + len(ending)
    text = before + content + ending + template.turn.tail
    return Rendered(text, ((len(before), end),), ending)


def _marked(
    row: Conversation, i: int, through: str, start: int, template: ChatTemplate
) -> Rendered:
    """The template's own markers, corrected to end with the end-of-turn token."""
    encoding = template.encode(through)
    mask = template.marked(row.messages[: i + 1], row.tools)
    ids, offsets = encoding.ids, encoding.offsets
    if len(mask) != len(ids):
        raise Unusable("the chat template renders differently with its generation markers")
    endings = set(template.encode(template.turn.ending).ids[-1:])
    spans: list[Span] = []
    for first, last in _runs(mask):
        if offsets[first][0] < start:
            continue
        inside = [n for n in range(first, last) if ids[n] in endings]
        if inside:
            last = inside[-1] + 1
        elif last < len(ids) and ids[last] in endings:
            last += 1
        spans.append((offsets[first][0], offsets[last - 1][1]))
    if not spans:
        raise Unusable("the chat template marks nothing of an answer")
    return Rendered(through, tuple(spans), _ending(through[: spans[-1][1]], template))


def _end_of_answer(through: str, start: int, template: ChatTemplate) -> int:
    """Where the target stops: the usual end-of-turn, or another, as behind a call of gpt-oss."""
    turn = template.turn
    if through.endswith(turn.ending + turn.tail):
        return len(through) - len(turn.tail)
    encoding = template.encode(through[start:])
    for token, (_, end) in zip(reversed(encoding.ids), reversed(encoding.offsets), strict=True):
        if token in template.eos_token_ids:
            return start + end
    raise Unusable("the chat template ends an answer in an unusual way")


def _ending(text: str, template: ChatTemplate) -> str:
    ending = template.turn.ending
    return ending if text.endswith(ending) else ""


def _runs(mask: Sequence[bool]) -> list[Span]:
    padded = [False, *mask, False]
    edges = [i for i in range(len(mask) + 1) if padded[i] != padded[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))
