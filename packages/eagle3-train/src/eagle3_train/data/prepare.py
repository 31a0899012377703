"""Conversations to training examples, with an account of what was kept, cut and dropped."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from eagle3_core import UserError
from eagle3_train.data.drops import Drops, Unusable
from eagle3_train.data.mask import Example, to_examples
from eagle3_train.data.read import Conversation, read_conversations
from eagle3_train.data.template import ChatTemplate
from eagle3_train.display import display

_SUSPICIOUS = 0.95  # a supervised fraction above this means that prompts are supervised too
_SAMPLE_CHARACTERS = 200


@dataclass
class SourceCounts:
    """What became of one source."""

    rows: int = 0
    dropped: int = 0
    examples: int = 0  # more than the rows kept where a template rewrites history
    tokens: int = 0
    supervised: int = 0  # of the tokens

    def add(self, examples: Sequence[Example]) -> None:
        """Count what one row became."""
        self.examples += len(examples)
        self.tokens += sum(len(example.input_ids) for example in examples)
        self.supervised += sum(int(example.loss_mask.sum()) for example in examples)


@dataclass
class Prepared:
    """Examples and their account."""

    examples: list[Example]
    drops: Drops
    sources: dict[str, SourceCounts]
    max_length: int  # tokens of an example
    cut_rows: list[str] = field(default_factory=list)  # where max_length cut something off
    cut_supervised_tokens: int = 0
    replaced_surrogates: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # about the template

    @property
    def num_rows(self) -> int:
        """Read, whatever became of them."""
        return sum(source.rows for source in self.sources.values())

    @property
    def num_tokens(self) -> int:
        """Over all examples."""
        return sum(source.tokens for source in self.sources.values())

    @property
    def supervised_fraction(self) -> float:
        """Share of the tokens that the target would write itself."""
        supervised = sum(source.supervised for source in self.sources.values())
        return supervised / max(1, self.num_tokens)

    def warnings(self) -> list[str]:
        """One sentence for each thing a user should know."""
        found = [*self.drops.summary(), *self.notes]
        if self.cut_rows:
            found.append(
                f"{len(self.cut_rows)} examples cut to {self.max_length} tokens "
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
    prepared = Prepared(
        [], Drops(strict), {s: SourceCounts() for s in sources}, max_length, notes=_notes(template)
    )
    rows: list[tuple[SourceCounts, Conversation]] = []
    for source in sources:
        before, counts = len(prepared.drops), prepared.sources[source]
        read = read_conversations([source], prepared.drops)
        prepared.replaced_surrogates.extend(read.replaced_surrogates)
        rows += [(counts, conversation) for conversation in read.conversations]
        dropped = len(prepared.drops) - before
        counts.rows += len(read.conversations) + dropped
        counts.dropped += dropped
    with display("prepare", len(rows), progress) as bar:
        for done, (counts, row) in enumerate(rows, 1):
            try:
                examples = _cut(to_examples(row, template), prepared)
            except Unusable as reason:
                prepared.drops.add(row.where, str(reason))
                counts.dropped += 1
            else:
                prepared.examples.extend(examples)
                counts.add(examples)
            bar.update(done)
        if not prepared.examples:
            raise UserError(_nothing(prepared, [row for _, row in rows[:1]], template))
    return prepared


def _cut(examples: Sequence[Example], prepared: Prepared) -> list[Example]:
    """Examples of one row within max_length; what that costs is noted."""
    limit, kept = prepared.max_length, []
    for example in examples:
        if len(example.input_ids) > limit:
            prepared.cut_rows.append(example.where)
            prepared.cut_supervised_tokens += int(example.loss_mask[limit:].sum())
            example = replace(
                example,
                input_ids=example.input_ids[:limit],
                loss_mask=example.loss_mask[:limit],
            )
        if example.loss_mask.any():
            kept.append(example)
    if not kept:
        raise Unusable(f"nothing supervised within max_length, {limit} tokens")
    return kept


def _notes(template: ChatTemplate) -> list[str]:
    if not template.writes_the_date:
        return []
    return [
        "the chat template writes today's date into every example; "
        "data.template_arguments can fix it (in Llama's templates as date_string)"
    ]


def show(prepared: Prepared, template: ChatTemplate, console: Console) -> None:
    """Print one example with its supervised tokens coloured, the counts and the warnings."""
    example = prepared.examples[0]
    console.print(f"{example.where} (supervised tokens in green)")
    console.print(coloured(example, template), soft_wrap=True)
    for source, counts in prepared.sources.items():
        console.print(_account(source, counts), highlight=False, markup=False)
    if len(prepared.sources) > 1:
        console.print(
            f"together: {prepared.num_rows} rows, {len(prepared.examples)} examples, "
            f"{prepared.num_tokens} tokens, {prepared.supervised_fraction:.1%} supervised",
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


def _account(source: str, counts: SourceCounts) -> str:
    dropped = f", {counts.dropped} dropped" if counts.dropped else ""
    return (
        f"{source}: {counts.rows} rows{dropped}, {counts.examples} examples, "
        f"{counts.tokens} tokens, {counts.supervised / max(1, counts.tokens):.1%} supervised"
    )


def _nothing(prepared: Prepared, shown: Sequence[Conversation], template: ChatTemplate) -> str:
    files = ", ".join(str(Path(source)) for source in prepared.sources)
    if not prepared.num_rows:
        return f"{files}: holds no rows, expected conversations"
    reasons = "; ".join(prepared.drops.summary())
    sample = f"; a sample: {_sample(shown[0], template)!r}" if shown else ""
    return f"{files}: supervised fraction 0 of {prepared.num_rows} rows: {reasons}{sample}"


def _sample(row: Conversation, template: ChatTemplate) -> str:
    """What the tokenizer makes of a row, or the row itself where the template refuses it."""
    if row.tokens is not None:
        known = [i for i in row.tokens[0] if 0 <= i < len(template.tokenizer)]
        return template.decode(known)[:_SAMPLE_CHARACTERS]
    try:
        text = row.text if row.text is not None else template.render(row.messages, tools=row.tools)
    except Unusable:
        text = str([dict(message) for message in row.messages])
    return template.decode(template.encode(text).ids)[:_SAMPLE_CHARACTERS]
