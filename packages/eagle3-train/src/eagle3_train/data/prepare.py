"""Conversations to training examples, with an account of what was kept, cut and dropped."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from eagle3_core import UserError
from eagle3_train.data.drops import Drops, Unusable
from eagle3_train.data.mask import Example, to_example
from eagle3_train.data.read import Conversation, read_conversations
from eagle3_train.data.template import ChatTemplate
from eagle3_train.display import display

_SUSPICIOUS = 0.95  # a supervised fraction above this means that prompts are supervised too
_SAMPLE_CHARACTERS = 200


@dataclass(frozen=True)
class Prepared:
    """Examples and their account."""

    examples: list[Example]
    drops: Drops
    num_rows: int
    max_length: int  # tokens of an example
    cut_rows: list[str] = field(default_factory=list)  # where max_length cut something off
    cut_supervised_tokens: int = 0
    replaced_surrogates: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Over all examples."""
        return sum(len(example.input_ids) for example in self.examples)

    @property
    def supervised_fraction(self) -> float:
        """Share of the tokens that the target would write itself."""
        supervised = sum(int(example.loss_mask.sum()) for example in self.examples)
        return supervised / max(1, self.num_tokens)

    def warnings(self) -> list[str]:
        """One sentence for each thing a user should know."""
        found = self.drops.summary()
        if self.cut_rows:
            found.append(
                f"{len(self.cut_rows)} rows cut to {self.max_length} tokens "
                f"({self.cut_rows[0]} first), {self.cut_supervised_tokens} supervised tokens lost"
            )
        if self.replaced_surrogates:
            found.append(
                f"unpaired surrogates became U+FFFD in {len(self.replaced_surrogates)} rows "
                f"({self.replaced_surrogates[0]} first)"
            )
        if self.supervised_fraction > _SUSPICIOUS:
            found.append(
                f"{self.supervised_fraction:.1%} of the tokens are supervised: "
                "are prompts among them?"
            )
        return found


def prepare(
    sources: Sequence[str],
    template: ChatTemplate,
    *,
    max_length: int,
    strict: bool = False,
    progress: bool = True,
) -> Prepared:
    """Read, render, encode and mask every row.

    Args:
        sources: see `read_conversations`.
        template: of the target.
        max_length: tokens; longer examples lose their end, and are dropped if that takes all
            supervision.
        strict: an unusable row ends the run.
        progress: show it.

    Raises:
        UserError: no rows, or none of them has a supervised token.
    """
    drops = Drops(strict)
    rows = read_conversations(sources, drops)
    conversations = rows.conversations
    examples: list[Example] = []
    cut_rows: list[str] = []
    lost = 0
    with display("prepare", len(conversations), progress) as bar:
        for done, row in enumerate(conversations, 1):
            try:
                example = to_example(row, template)
                if len(example.input_ids) > max_length:
                    cut_rows.append(row.where)
                    lost += int(example.loss_mask[max_length:].sum())
                    example = _truncate(example, max_length)
            except Unusable as reason:
                drops.add(row.where, str(reason))
            else:
                examples.append(example)
            bar.update(done)
        num_rows = len(examples) + len(drops)
        if not examples:
            raise UserError(_nothing(sources, num_rows, drops, conversations, template))
    return Prepared(examples, drops, num_rows, max_length, cut_rows, lost, rows.replaced_surrogates)


def show(prepared: Prepared, template: ChatTemplate, console: Console) -> None:
    """Print one example with its supervised tokens coloured, the counts and the warnings."""
    example = prepared.examples[0]
    console.print(f"{example.where} (supervised tokens in green)")
    console.print(coloured(example, template), soft_wrap=True)
    console.print(
        f"{len(prepared.examples)} of {prepared.num_rows} rows, {prepared.num_tokens} tokens, "
        f"{prepared.supervised_fraction:.1%} supervised",
        highlight=False,
    )
    for warning in prepared.warnings():
        console.print(Text(warning, style="yellow"))


def coloured(example: Example, template: ChatTemplate) -> Text:
    """The example's text; runs of supervised tokens are green."""
    text = Text()
    ids, mask = example.input_ids.tolist(), example.loss_mask.tolist()
    start = 0
    for i in range(1, len(ids) + 1):  # decode whole runs: one token may be part of a character
        if i == len(ids) or mask[i] != mask[start]:
            style = "bold green" if mask[start] else "dim"
            text.append(template.decode(ids[start:i]), style=style)
            start = i
    return text


def _truncate(example: Example, max_length: int) -> Example:
    mask = example.loss_mask[:max_length]
    if not mask.any():
        raise Unusable(f"nothing supervised within max_length, {max_length} tokens")
    return replace(example, input_ids=example.input_ids[:max_length], loss_mask=mask)


def _nothing(
    sources: Sequence[str],
    num_rows: int,
    drops: Drops,
    conversations: Sequence[Conversation],
    template: ChatTemplate,
) -> str:
    files = ", ".join(str(Path(source)) for source in sources)
    if not num_rows:
        return f"{files}: holds no rows, expected conversations"
    reasons = "; ".join(drops.summary())
    shown = f"; a sample: {_sample(conversations[0], template)!r}" if conversations else ""
    return f"{files}: supervised fraction 0 of {num_rows} rows: {reasons}{shown}"


def _sample(row: Conversation, template: ChatTemplate) -> str:
    """What the tokenizer makes of a row, or the row itself where the template refuses it."""
    try:
        text = row.text if row.text is not None else template.render(row.messages, tools=row.tools)
    except Unusable:
        text = str([dict(message) for message in row.messages])
    return template.decode(template.encode(text).ids)[:_SAMPLE_CHARACTERS]
