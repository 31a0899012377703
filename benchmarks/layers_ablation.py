"""What do draft layers after the first gain, on the same data and for the same steps?

    benchmarks/layers_ablation.py CONFIG.yaml OUT [--seeds S] [--num-processes P] [a.key=value …]

CONFIG.yaml is that of a run whose `capture` is done, held-out data included: `eagle3-train fit` and
`eval` run for every arm (1 layer; 2 layers, the embedding into the first or into every one; 3
layers; each with and without a norm per aux state and post-norm feedback) and every seed on those
states. What is finished is kept and not run again, and several of these commands may share OUT.
Before that the cost of a round is measured in the engine, one request at a time.

Writes OUT/report.json, a table to stdout, and OUT/accept_length.svg and OUT/speedup.svg. Removing
OUT/runs/*/{chain,tree}.json evaluates the drafts again without training them again.
"""

import argparse
import fcntl
import functools
import json
import operator
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.console import Console
from round_cost import milliseconds

from eagle3_core import Eagle3Draft, UserError, load_draft
from eagle3_core.target import Target, load_target
from eagle3_core.tree import TreeShape
from eagle3_core.vocab import vocab_map
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_train.build import draft_config
from eagle3_train.cli import main as eagle3_train
from eagle3_train.config import DraftSection, TrainConfig, load_config
from eagle3_train.evaluate import evaluate
from eagle3_train.resume import write_json
from eagle3_train.simulate import Simulator
from eagle3_train.store import FeatureStore

PLAIN = "target alone"
K = 5  # drafted tokens of a chain, and depth of the tree
TREE = TreeShape(K, topk=4, num_verify_tokens=16)
RESULTS = ("chain.json", "tree.json")
REPEATS = 5  # answers whose median is a round's cost
TOKENS = 6  # of each of these answers

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Arm:
    """One kind of draft."""

    num_layers: int
    layer_input: str
    with_norms: bool  # of each aux state, and of what is fed back

    @property
    def shape(self) -> str:
        """Such as `L2-every`; with one layer `first` and `every` are the same."""
        return f"L{self.num_layers}" + (f"-{self.layer_input}" if self.num_layers > 1 else "")

    @property
    def name(self) -> str:
        """Also the name of its folders."""
        return self.shape + ("-norms" if self.with_norms else "")

    @property
    def overrides(self) -> list[str]:
        """As a user would type them."""
        norms = ("per_layer", "post_norm") if self.with_norms else ("none", "pre_norm")
        return [
            f"draft.num_hidden_layers={self.num_layers}",
            f"draft.layer_input={self.layer_input}",
            f"draft.aux_norm={norms[0]}",
            f"draft.feedback={norms[1]}",
        ]


SHAPES = ((1, "first"), (2, "first"), (2, "every"), (3, "first"))
ARMS = tuple(Arm(*shape, with_norms) for with_norms in (False, True) for shape in SHAPES)


@dataclass(frozen=True)
class Ablation:
    """The command's arguments."""

    config_path: str
    out: Path
    seeds: int
    num_processes: int
    tree_samples: int
    overrides: tuple[str, ...]

    @property
    def config(self) -> TrainConfig:
        """Of the run whose states are used."""
        return load_config(self.config_path, self.overrides)

    def arguments(self, arm: Arm, seed: int) -> list[str]:
        """Of `eagle3-train fit` and `eval` for one arm."""
        own = [f"output={self.folder(arm, seed)}", f"seed={seed}"]
        # A held-out pass during fit would only cost time.
        settings = [f"eval.num_speculative_tokens={K}", "eval.every=null"]
        return [*self.overrides, *arm.overrides, *own, *settings]

    def folder(self, arm: Arm, seed: int) -> Path:
        """Where a run is kept."""
        return self.out / "runs" / f"{arm.name}-seed{seed}"


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether this process may work in `folder`; False while another one does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def run(ablation: Ablation, arm: Arm, seed: int) -> None:
    """Fit and evaluate one draft; leaves chain.json and tree.json in its folder.

    Raises:
        UserError: fit failed, with its own line on stderr.
    """
    folder = ablation.folder(arm, seed)
    with claimed(folder) as mine:
        if not mine or all((folder / name).exists() for name in RESULTS):
            return
        console.rule(f"{folder.name}", align="left")
        features = folder / "features"
        if not features.exists():
            features.symlink_to((ablation.config.out / "features").resolve())
        arguments = ablation.arguments(arm, seed)
        processes = ["--num-processes", str(ablation.num_processes)]
        status = eagle3_train(["fit", ablation.config_path, *arguments, *processes, "--json"])
        if status == 130:
            raise KeyboardInterrupt
        if status:
            raise UserError(f"{folder}: fit ended with status {status}")
        evaluate_draft(ablation, folder)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the draft is kept


def evaluate_draft(ablation: Ablation, folder: Path) -> None:
    """The simulated accept lengths: of a chain on all held-out samples, of a tree on some."""
    store = FeatureStore(folder / "features" / "eval")
    draft = load_draft(folder / "draft").draft
    head = store.head().float()
    kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
    last = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    if not (folder / "chain.json").exists():
        # One by one: answers differ, and that is the noise of a difference between two drafts.
        each = [evaluate(draft, store, [i], head[kept], K, 4096) for i in range(len(store))]
        facts = {
            "steps": last["step"],
            "tokens": last["tokens"],
            "answers": [[int(c["rounds"][0]), int(c["accepted"].sum())] for c in each],
        }
        total = functools.reduce(operator.add, each)
        write_json(folder / "chain.json", {**total.summary(), **facts})
    if not (folder / "tree.json").exists():
        step = max(1, len(store) // ablation.tree_samples)
        simulator = Simulator(draft, head, TREE)
        parts = [simulator.run(store[i]) for i in range(0, len(store), step)]
        total = functools.reduce(operator.add, parts)
        write_json(folder / "tree.json", {"samples": len(parts), **total.summary()})


def measure_cost(ablation: Ablation) -> dict[str, Any]:
    """Milliseconds of a plain step of the target, and of a round and a draft step of each arm."""
    path = ablation.out / "cost.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    config = ablation.config
    target = load_target(config.target)
    aux_layer_ids = FeatureStore(config.out / "features" / "eval").meta.aux_layer_ids
    engines = {PLAIN: Engine(target, None, EngineConfig(max_batch_size=1, max_model_len=512))}
    parameters = {}
    for arm in ARMS:
        section = load_config(ablation.config_path, ablation.arguments(arm, 0)).draft
        draft = random_draft(section, target, aux_layer_ids)
        parameters[arm.name] = trained_parameters(draft)
        settings = EngineConfig(num_speculative_tokens=K, max_batch_size=1, max_model_len=512)
        engines[arm.name] = Engine(target, draft, settings)
    phases = median_phases(engines)
    plain = sum(phases.pop(PLAIN).values())
    # The target's part of a round is the same work for every draft.
    shared = sum(statistics.mean(p[name] for p in phases.values()) for name in ("verify", "accept"))
    rounds = {
        name: {
            "parameters": parameters[name],
            "round_ms": shared + own["draft"] + own["extend"],
            # The first token of a chain comes from the pass over the verified ones.
            "draft_step_ms": own["draft"] / (K - 1),
        }
        for name, own in phases.items()
    }
    cost = {"plain_ms": plain, "rounds": rounds, **machine()}
    write_json(path, cost)
    return cost


def random_draft(
    section: DraftSection, target: Target, aux_layer_ids: tuple[int, ...]
) -> Eagle3Draft:
    """What a round costs does not depend on the weights."""
    size = section.vocab_size or target.vocab_size
    draft = Eagle3Draft(draft_config(section, target, aux_layer_ids, size))
    draft.init_weights(torch.Generator().manual_seed(0))
    if draft.config.is_pruned:
        draft.d2t, draft.t2d = vocab_map(torch.arange(size), target.vocab_size)
    return draft.eval().requires_grad_(False)


def trained_parameters(draft: Eagle3Draft) -> int:
    """Without the embeddings and the head, which are the target's."""
    lent = ("embed_tokens", "lm_head")
    return sum(p.numel() for n, p in draft.named_parameters() if not n.startswith(lent))


def median_phases(engines: Mapping[str, Engine]) -> dict[str, dict[str, float]]:
    """Milliseconds of each phase of a round: the median over answers, which take turns."""
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for _ in range(REPEATS):
        for name, engine in engines.items():
            answers[name].append(milliseconds(engine, TOKENS))
    return {
        name: {phase: statistics.median(a[phase] for a in found) for phase in found[0]}
        for name, found in answers.items()
    }


def machine() -> dict[str, Any]:
    """What the milliseconds belong to."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    return {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit.strip(),
    }


def summarise(ablation: Ablation, cost: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each arm that has a finished seed."""
    rows = []
    for arm in ARMS:
        runs = finished(ablation, arm, "chain.json")
        trees = finished(ablation, arm, "tree.json")
        if not runs:
            continue
        single = finished(ablation, Arm(1, "first", arm.with_norms), "chain.json")
        lengths = [run["accept_length"] for run in runs.values()]
        # The same seed is the same data in the same order.
        pairs = [(runs[seed], single[seed]) for seed in runs if seed in single]
        gains = [ours["accept_length"] - theirs["accept_length"] for ours, theirs in pairs]
        round_cost = cost["rounds"][arm.name]
        ratio = round_cost["draft_step_ms"] / cost["plain_ms"]
        rows.append(
            {
                "arm": arm.name,
                "seeds": list(runs),
                "accept_length": spread(lengths),
                "gain_over_one_layer": spread(gains),
                "gain_standard_error": statistics.mean(
                    standard_error(ours["answers"], theirs["answers"]) for ours, theirs in pairs
                )
                if pairs
                else None,
                "tree": spread([t["laws"]["greedy_tree"]["accept_length"] for t in trees.values()]),
                "acceptance_per_position": [
                    statistics.mean(rates)
                    for rates in zip(
                        *(run["acceptance_per_position"] for run in runs.values()), strict=True
                    )
                ],
                "steps": [run["steps"] for run in runs.values()],
                "tokens": [run["tokens"] for run in runs.values()],
                **round_cost,
                "draft_step_per_target_step": ratio,
                "speedup_of_cheap_verify": statistics.mean(lengths) / (1 + K * ratio),
                "speedup_here": statistics.mean(lengths)
                * cost["plain_ms"]
                / round_cost["round_ms"],
            }
        )
    return rows


def finished(ablation: Ablation, arm: Arm, result: str) -> dict[int, dict[str, Any]]:
    """Seed -> what `evaluate_draft` left."""
    paths = {seed: ablation.folder(arm, seed) / result for seed in range(ablation.seeds)}
    return {s: json.loads(p.read_text(encoding="utf-8")) for s, p in paths.items() if p.exists()}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, and the standard deviation over seeds where there are several."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values) if values else None, "sd": sd, "values": list(values)}


def standard_error(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> float:
    """Of the difference of two accept lengths on the same answers, by leaving out one at a time.

    Each argument holds [rounds, accepted tokens] of every answer.
    """
    a, b = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    without = [total - part for total, part in ((a.sum(0), a), (b.sum(0), b))]
    gains = without[0][:, 1] / without[0][:, 0] - without[1][:, 1] / without[1][:, 0]
    return float(((len(a) - 1) * gains.var(correction=0)).sqrt())


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A Markdown table on stdout."""
    print(
        "| draft | seeds | accept length, chain | against one layer | tree | parameters "
        "| draft step, ms | round, ms | speed-up of this round | if a verify cost one step |"
    )
    print("|---" * 10 + "|")
    for row in rows:
        print(
            f"| {row['arm']} | {len(row['seeds'])} | {shown(row['accept_length'])} "
            f"| {shown(row['gain_over_one_layer'], '+')} "
            f"(s.e. {row['gain_standard_error'] or 0:.3f}) | {shown(row['tree'])} "
            f"| {row['parameters'] / 1e6:.1f} M "
            f"| {row['draft_step_ms']:.2f} | {row['round_ms']:.1f} "
            f"| {row['speedup_here']:.2f} | {row['speedup_of_cheap_verify']:.2f} |"
        )


def shown(value: dict[str, Any], sign: str = "") -> str:
    """Mean ± standard deviation."""
    if value["mean"] is None:
        return ""
    sd = "" if value["sd"] is None else f" ± {value['sd']:.3f}"
    return f"{value['mean']:{sign}.3f}{sd}"


def plot(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """OUT/accept_length.svg (a dot a seed) and OUT/speedup.svg."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "eagle3", "font.size": 9})
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for i, row in enumerate(rows):
        values = row["accept_length"]["values"]
        colour = "C1" if row["arm"].endswith("-norms") else "C0"
        axes.plot([i] * len(values), values, "o", color=colour, alpha=0.6, markersize=4)
        axes.plot([i - 0.25, i + 0.25], [row["accept_length"]["mean"]] * 2, color=colour)
    axes.set_xticks(range(len(rows)), [row["arm"] for row in rows], rotation=20, ha="right")
    axes.set_ylabel("accept length, K=5")
    axes.grid(axis="y", alpha=0.3)
    save(figure, out / "accept_length.svg")

    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for column, (name, label) in enumerate(
        (("speedup_here", "this round"), ("speedup_of_cheap_verify", "a verify costs one step"))
    ):
        where = [i + 0.4 * column - 0.2 for i in range(len(rows))]
        axes.bar(where, [row[name] for row in rows], 0.38, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["arm"] for row in rows], rotation=20, ha="right")
    axes.set_ylabel("estimated speed-up")
    axes.legend()
    save(figure, out / "speedup.svg")


def save(figure: Figure, path: Path) -> None:
    """The same bytes for the same rows."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def parse() -> Ablation:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--seeds", type=int, default=3, metavar="S")
    parser.add_argument("--num-processes", type=int, default=1, metavar="P", help="of each fit")
    parser.add_argument(
        "--tree-samples", type=int, default=10**9, metavar="N", help="held-out ones; default: all"
    )
    options = parser.parse_intermixed_args()
    return Ablation(
        options.config,
        options.out,
        options.seeds,
        options.num_processes,
        options.tree_samples,
        tuple(options.overrides),
    )


def main() -> int:
    """Run what is missing, then report."""
    ablation = parse()
    try:
        cost = measure_cost(ablation)
        for seed in range(ablation.seeds):  # seeds outermost: a run cut short is still balanced
            for arm in ARMS:
                run(ablation, arm, seed)
        rows = summarise(ablation, cost)
    except UserError as error:
        print(f"layers_ablation: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    report = {"benchmark": "layers_ablation", "K": K, "arms": rows, "cost": cost}
    write_json(ablation.out / "report.json", report)
    plot(rows, ablation.out)
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
