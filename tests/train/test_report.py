"""The report: one file that needs no other, with every plot, whatever of a run there is."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eagle3_train.plots import Chart, Line, line_chart
from eagle3_train.report import length_histogram, page, write_report
from eagle3_train.simulate import LAWS

PLOTS = {
    "loss", "accept-length", "acceptance", "divergence", "positions", "gradient", "lengths",
    "supervised", "throughput", "data-wait", "memory",
}  # fmt: skip
VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Collects what a test asks; refuses tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.plots: dict[str, int] = {}  # figure -> drawn paths
        self.text = ""
        self._figure = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        for name in ("href", "src", "xlink:href", "data", "action", "srcset", "poster"):
            if values.get(name) is not None:
                self.references.append(str(values[name]))
        if "id" in values:
            self.ids.append(str(values["id"]))
        if tag == "figure":
            self._figure = str(values["id"])
            self.plots[self._figure] = 0
        elif tag == "path" and "figure" in self.open:
            self.plots[self._figure] += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def rows(count: int = 30) -> list[dict[str, Any]]:
    found = []
    for step in range(1, count + 1):
        row: dict[str, Any] = {
            "step": step,
            "loss": 9.0 / step,
            "kl_per_step": [1 / step, 2 / step],
            "loss_per_step": [3 / step, 4 / step],
            "accuracy_per_step": [0.5, 0.4],
            "acceptance_per_position": [0.5, 0.25] if step % 7 else None,
            "accept_length": 1.75 if step % 7 else None,
            "grad_norm": 2.0,
            "tokens": 100 * step,
            "elapsed": 0.5 * step,
            "tokens_per_s": 200.0,
            "data_wait_s": 0.1,
            "compute_s": 0.4,
            "rss_bytes": 2**30,
            "peak_bytes": 2**31,
            "supervised_fraction": 0.5,
        }
        if step % 10 == 0:
            row["eval"] = {"accept_length": 1.5, "acceptance_per_position": [0.3, 0.2]}
        found.append(row)
    return found


RUN = {
    "argv": ["eagle3-train", "fit", "<script>alert(1)</script>.yaml"],
    "commit": "0123456789abcdef",
    "versions": {"torch": "2.99"},
    "config": {
        "output": "out",
        "target": "a<b",
        "draft": {"num_hidden_layers": 2, "vocab_size": 64},
        "fit": {"clip_norm": 1.0, "ttt_length": 2},
        "eval": {"num_speculative_tokens": 2},
    },
    "samples": length_histogram([5, 9, 9, 30]),
}
EVAL = {
    "samples": 4, "num_speculative_tokens": 2, "topk": 3, "num_verify_tokens": 7,
    "accept_length": 1.625,
    "datasets": [
        {
            "name": f"data/{name}.jsonl",
            "rounds": 1234,
            "laws": {law: {"accept_length": 1.0 + i / 8} for i, law in enumerate(LAWS)},
        }
        for name in ("chat", "code")
    ],
}  # fmt: skip


def test_it_holds_every_plot_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows()))
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    (tmp_path / "eval.json").write_text(json.dumps(EVAL))
    text = write_report(tmp_path).read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "eval.json", "metrics.jsonl", "report.html", "run.json",
    ]  # fmt: skip
    found = Page(text)
    assert set(found.plots) == PLOTS
    assert min(found.plots.values()) > 5
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert all(reference.startswith("#") for reference in found.references)
    assert {reference[1:] for reference in found.references} <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))
    assert "://" not in text
    assert "@import" not in text
    assert text.count("url(") == text.count("url(#")


def test_it_says_what_the_run_was() -> None:
    found = Page(page(rows(), RUN, EVAL))
    for expected in (
        "EAGLE-3 draft for a<b",
        "2 layers · 64 draft tokens · 30 steps · commit 0123456789ab",
        "eagle3-train fit <script>alert(1)</script>.yaml",
        "torch",
        "1.62accept length, held out, chain of 2",
        "1.75accept length, training, chain of 2",
        "20.0% of the time went into waiting for data. The device could do more.",
        "The gradient was clipped at 1 in 100% of the steps.",
        "Held out it is 1.50",
        "chat.jsonl1,2341.0001.1251.2501.3751.500",
        "num_hidden_layers: 2",
    ):
        assert expected in found.text


@pytest.mark.parametrize("count", [0, 1, 2])
def test_little_is_enough(count: int) -> None:
    found = Page(page(rows(count), {}, {}))
    assert ("loss" in found.plots) == (count > 0)


def test_long_runs_stay_light() -> None:
    x = list(range(200_000))
    plot = line_chart("a", "a", "a", Chart("y", lines=[Line("l", x, [float(i % 7) for i in x])]))
    assert len(plot.svg) < 100_000


def test_colours_come_from_the_page() -> None:
    svg = line_chart("a", "a", "a", Chart("y", lines=[Line("l", [1, 2], [1, 2])])).svg
    assert "var(--ink)" in svg
    assert "var(--grid)" in svg
    assert "#0a0b0c" not in svg
