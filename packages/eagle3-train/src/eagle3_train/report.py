"""OUT/report.html: a training run on one page that needs nothing but a browser."""

import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eagle3_train.plots import (
    Chart,
    Line,
    Plot,
    Row,
    bar_chart,
    histogram,
    line_chart,
    over_steps,
    per_position,
)
from eagle3_train.simulate import LAWS

NAME = "report.html"
_BINS = 40
_LAST = 0.1  # of the steps: what the training numbers of the page average over

_CSS = """
:root { color-scheme: light dark; --paper: #fbfbfa; --card: #ffffff; --ink: #1d1f23;
  --soft: #666c76; --grid: #dcdfe4; --accent: #3b82f6; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --card: #1b1e24; --ink: #e6e8ec;
  --soft: #9aa1ad; --grid: #343943; --accent: #7ab0ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0 0 2px; }
p { margin: 0 0 8px; }
.soft, figcaption { color: var(--soft); font-size: 13.5px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 24px 0 8px; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--grid);
  border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile b { display: block; font-size: 21px; font-weight: 650; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px 16px 10px; }
figure svg { width: 100%; height: auto; display: block; margin-top: 6px; }
figcaption { margin-top: 4px; }
ul { margin: 0; padding-left: 20px; }
li { margin: 4px 0; }
.card { padding: 4px 16px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 12px; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { border-bottom: 0; }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--accent); }
pre { margin: 10px 0; font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace;
  overflow-x: auto; }
@media (max-width: 520px) { .plots { grid-template-columns: 1fr; } }
"""


def length_histogram(lengths: Sequence[int]) -> dict[str, Any]:
    """What a report says about the samples: their number, tokens, and how long they are."""
    counts, edges = np.histogram(np.asarray(lengths), bins=min(_BINS, max(1, len(set(lengths)))))
    return {
        "count": len(lengths),
        "tokens": sum(lengths),
        "length_counts": counts.tolist(),
        "length_edges": edges.tolist(),
    }


def write_report(out: Path) -> Path:
    """Write OUT/report.html from metrics.jsonl, run.json and eval.json, as far as they are there.

    Args:
        out: the output folder of a run.
    """
    rows = _read_lines(out / "metrics.jsonl")
    run, held_out = _read(out / "run.json"), _read(out / "eval.json")
    work, path = out / f".{NAME}.tmp", out / NAME
    work.write_text(page(rows, run, held_out), encoding="utf-8")
    os.replace(work, path)
    return path


def page(rows: Sequence[Row], run: Mapping[str, Any], held_out: Mapping[str, Any]) -> str:
    """The page.

    Args:
        rows: of metrics.jsonl; may be empty.
        run: run.json, or empty.
        held_out: eval.json, or empty.
    """
    config = run.get("config", {})
    title = f"EAGLE-3 draft for {config.get('target', 'an unknown target')}"
    parts = [f"<h1>{_text(title)}</h1>", f'<p class="soft">{_text(_subtitle(rows, run))}</p>']
    parts += [_tiles(rows, held_out, config), _findings(rows, config)]
    if held_out:
        parts += ["<h2>On held-out text</h2>", _datasets(held_out)]
    if plots := [*_learning_plots(rows), *_data_plots(rows, run), *_speed_plots(rows)]:
        parts += ["<h2>The run</h2>", '<div class="plots">', *map(_figure, plots), "</div>"]
    parts += ["<h2>How it was made</h2>", _origin(run)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _subtitle(rows: Sequence[Row], run: Mapping[str, Any]) -> str:
    config = run.get("config", {})
    draft = config.get("draft", {})
    layers = draft.get("num_hidden_layers")
    parts = [config.get("output")]
    if layers is not None:
        parts.append(f"{layers} {'layer' if layers == 1 else 'layers'}")
        size = draft.get("vocab_size")
        parts.append("full vocabulary" if size is None else f"{size:,} draft tokens")
    if rows:
        parts.append(f"{len(rows):,} steps")
    if run.get("commit"):
        parts.append(f"commit {run['commit'][:12]}")
    return " · ".join(part for part in parts if part)


def _tiles(rows: Sequence[Row], held_out: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    tiles: list[tuple[str, str]] = []
    length, steps = _held_out_length(rows, held_out), config.get("eval", {})
    if length is not None:
        chain = steps.get("num_speculative_tokens", held_out.get("num_speculative_tokens"))
        tiles.append((f"{length:.2f}", f"accept length, held out, chain of {chain}"))
    if rows:
        last, tail = rows[-1], _tail(rows)
        length = _mean(tail, "accept_length")
        if length is not None:
            chain = len(last["loss_per_step"])
            tiles.append((f"{length:.2f}", f"accept length, training, chain of {chain}"))
        tiles += [
            (f"{_mean(tail, 'loss'):.3f}", "loss"),
            (_short(last["tokens"]), "tokens trained on"),
            (_duration(last["elapsed"]), "training time"),
            (f"{last['tokens'] / max(last['elapsed'], 1e-9):,.0f}", "tokens per second"),
        ]
        if last.get("peak_bytes"):
            tiles.append((f"{last['peak_bytes'] / 2**30:.2f} GiB", "peak memory"))
    cells = (f'<div class="tile"><b>{_text(a)}</b><span>{_text(b)}</span></div>' for a, b in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>' if tiles else ""


def _findings(rows: Sequence[Row], config: Mapping[str, Any]) -> str:
    """What a reader should notice, in sentences; each has the number it rests on."""
    if not rows:
        return ""
    head, tail = rows[: max(1, len(rows) // 10)], _tail(rows)
    found = []
    first, last = _mean(head, "accept_length"), _mean(tail, "accept_length")
    if first is not None and last is not None:
        found.append(
            f"On training text the accept length went from {first:.2f} in the first tenth of the "
            f"steps to {last:.2f} in the last."
        )
    evaluations = [row for row in rows if row.get("eval")]
    if last is not None and evaluations:
        length = evaluations[-1]["eval"]["accept_length"]
        settings = config.get("eval", {}), config.get("fit", {})
        same = settings[0].get("num_speculative_tokens") == settings[1].get("ttt_length")
        if length is not None and same and last - length > 0.1 * last:
            found.append(
                f"Held out it is {length:.2f}: the gap asks for more text rather than more epochs."
            )
    wait, compute = _total(rows, "data_wait_s"), _total(rows, "compute_s")
    if wait + compute:
        share = wait / (wait + compute)
        found.append(
            f"{share:.1%} of the time went into waiting for data."
            + (" The device could do more." if share > 0.1 else "")
        )
    supervised = _mean(rows, "supervised_fraction")
    if supervised is not None:
        found.append(f"{supervised:.0%} of the tokens are the target's own and were learned from.")
    clip = config.get("fit", {}).get("clip_norm")
    if clip:
        clipped = sum(row["grad_norm"] > clip for row in rows) / len(rows)
        found.append(f"The gradient was clipped at {clip:g} in {clipped:.0%} of the steps.")
    return f"<ul>{''.join(f'<li>{_text(sentence)}</li>' for sentence in found)}</ul>"


def _learning_plots(rows: Sequence[Row]) -> list[Plot]:
    if not rows:
        return []
    evaluations = [{"step": row["step"], **row["eval"]} for row in rows if row.get("eval")]
    lengths = [over_steps(rows, "accept_length", "training")]
    if evaluations:
        line = over_steps(evaluations, "accept_length", "held out")
        lengths.append(Line(line.label, line.x, line.y, smooth=False, marker="o"))
    tail = _tail(rows)
    shares = {
        "right at k": _means(tail, "accuracy_per_step"),
        "right at 0 … k": _means(tail, "acceptance_per_position"),
    }
    if evaluations and evaluations[-1]["acceptance_per_position"]:
        shares["right at 0 … k, held out"] = evaluations[-1]["acceptance_per_position"]
    return [
        line_chart(
            "loss",
            "Loss",
            "Weighted over the steps of the unroll; thin: every step, bold: running mean.",
            Chart("loss", lines=[over_steps(rows, "loss", "loss")]),
        ),
        line_chart(
            "accept-length",
            "Accept length",
            "Tokens a verification would emit, its own included; where whole chains fit.",
            Chart("tokens", lines=lengths),
        ),
        line_chart(
            "acceptance",
            "Acceptance per position",
            "How often the draft's first choice is the target's at this and all earlier steps.",
            Chart("share", percent=True, lines=per_position(rows, "acceptance_per_position")),
        ),
        line_chart(
            "divergence",
            "Distance to the target",
            "KL divergence from the target's law over the draft's tokens, by step of the unroll.",
            Chart("nats", lines=per_position(rows, "kl_per_step")),
        ),
        bar_chart(
            "positions",
            "Where chains break",
            "Over the last tenth of the steps; the joint shares add up to accept length - 1.",
            {label: values for label, values in shares.items() if values},
            "step of the unroll k",
            "share of slots",
        ),
        line_chart(
            "gradient",
            "Gradient norm",
            "Before clipping.",
            Chart("norm", log=True, lines=[over_steps(rows, "grad_norm", "norm")]),
        ),
    ]


def _data_plots(rows: Sequence[Row], run: Mapping[str, Any]) -> list[Plot]:
    plots = []
    samples = run.get("samples")
    if samples:
        plots.append(
            histogram(
                "lengths",
                "Sample lengths",
                f"{samples['count']:,} samples, {samples['tokens']:,} tokens.",
                samples["length_counts"],
                samples["length_edges"],
                "tokens",
            )
        )
    fraction = over_steps(rows, "supervised_fraction", "supervised")
    if fraction.x:
        plots.append(
            line_chart(
                "supervised",
                "Supervised fraction",
                "Share of a step's tokens that the target would write: the loss mask.",
                Chart("share", percent=True, from_zero=True, lines=[fraction]),
            )
        )
    return plots


def _speed_plots(rows: Sequence[Row]) -> list[Plot]:
    if not rows:
        return []
    plots = [
        line_chart(
            "throughput",
            "Throughput",
            "Tokens of a step over its seconds, evaluations and checkpoints not counted.",
            Chart("tokens / s", from_zero=True, lines=[over_steps(rows, "tokens_per_s", "")]),
        )
    ]
    wait = []
    for row in rows:
        if "data_wait_s" in row:
            seconds = max(row["data_wait_s"] + row["compute_s"], 1e-9)
            wait.append({"step": row["step"], "share": row["data_wait_s"] / seconds})
    if wait:
        plots.append(
            line_chart(
                "data-wait",
                "Waiting for data",
                "Share of a step's time in which samples were not there yet.",
                Chart("share", percent=True, from_zero=True, lines=[over_steps(wait, "share", "")]),
            )
        )
    memory = [over_steps(rows, "rss_bytes", "resident"), over_steps(rows, "peak_bytes", "peak")]
    gib = [Line(m.label, m.x, [y / 2**30 for y in m.y], smooth=len(m.x) > 1) for m in memory if m.x]
    if gib:
        plots.append(
            line_chart(
                "memory",
                "Memory",
                "Of the first process. Peak: torch's allocations on a GPU, resident on a CPU.",
                Chart("GiB", from_zero=True, lines=gib),
            )
        )
    return plots


def _datasets(held_out: Mapping[str, Any]) -> str:
    """A row for each file of data.eval, a column for each law."""
    datasets = held_out["datasets"]
    laws = [law for law in LAWS if law in datasets[0]["laws"]]
    head = "".join(f"<th>{_text(LAWS[law])}</th>" for law in laws)
    body = ""
    for dataset in datasets:
        lengths = (dataset["laws"][law]["accept_length"] for law in laws)
        cells = "".join(f"<td>{'' if x is None else f'{x:.3f}'}</td>" for x in lengths)
        name = _text(Path(dataset["name"]).name)
        body += f"<tr><td>{name}</td><td>{dataset['rounds']:,}</td>{cells}</tr>"
    return (
        f"<p>Accept lengths, simulated on {held_out['samples']:,} samples with "
        f"{held_out['num_speculative_tokens']} drafted tokens in a chain and trees of that depth "
        f"({held_out['topk']} children, {held_out['num_verify_tokens']} verified "
        "tokens); T = 1 takes the answers for what the target drew.</p>"
        f'<div class="card"><table><tr><th>data</th><th>rounds</th>{head}</tr>{body}</table></div>'
    )


def _origin(run: Mapping[str, Any]) -> str:
    if not run:
        return '<p class="soft">run.json is not there.</p>'
    facts = {
        "command": " ".join(run.get("argv", [])),
        "commit": run.get("commit") or "not from a checkout",
        "seed": run.get("seed"),
        "platform": run.get("platform"),
        "python": run.get("python"),
        **run.get("versions", {}),
    }
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>" for name, value in facts.items()
    )
    config = yaml.safe_dump(run.get("config", {}), sort_keys=False, allow_unicode=True)
    return (
        f'<div class="card"><table>{rows}</table></div>'
        f"<details><summary>Configuration</summary><pre>{_text(config)}</pre></details>"
    )


def _figure(plot: Plot) -> str:
    return (
        f'<figure id="{plot.name}"><h3>{_text(plot.title)}</h3>{plot.svg}'
        f"<figcaption>{_text(plot.caption)}</figcaption></figure>"
    )


def _held_out_length(rows: Sequence[Row], held_out: Mapping[str, Any]) -> float | None:
    if held_out.get("accept_length") is not None:
        return held_out["accept_length"]
    return next((r["eval"]["accept_length"] for r in reversed(rows) if r.get("eval")), None)


def _tail(rows: Sequence[Row]) -> Sequence[Row]:
    return rows[-max(1, int(len(rows) * _LAST)) :]


def _total(rows: Sequence[Row], key: str) -> float:
    return sum(row.get(key) or 0.0 for row in rows)


def _mean(rows: Sequence[Row], key: str) -> float | None:
    found = [row[key] for row in rows if row.get(key) is not None]
    return sum(found) / len(found) if found else None


def _means(rows: Sequence[Row], key: str) -> list[float]:
    found = [row[key] for row in rows if row.get(key) is not None]
    found = [values for values in found if len(values) == len(found[-1])]  # the unroll may grow
    return [sum(column) / len(found) for column in zip(*found, strict=True)]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _read_lines(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _short(count: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _text(value: object) -> str:
    return html.escape(str(value))
