"""`eagle3-train`: one command a stage. Bad input ends with one line and exit status 2."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, get_args

from rich.console import Console

from eagle3_core import UserError
from eagle3_core.checkpoint.consumers import CONSUMERS
from eagle3_train.config import StrategyName, TrainConfig, load_config
from eagle3_train.export import export
from eagle3_train.fleet import Machine
from eagle3_train.launch import follow_parent, is_worker, launch, report_error
from eagle3_train.slurm import adopt_step, in_step

_STAGES = {
    "plan": "predict memory, disk and hours from the config; loads no weights, writes nothing",
    "prepare": "show what the data becomes: one example coloured, counts, rows left out",
    "regenerate": "let the target answer regenerate.prompts into OUT/regenerated.jsonl",
    "capture": "run the target over the data once and store its states in OUT/features",
    "fit": "train the draft into OUT/draft; continues an interrupted run",
    "eval": "simulated accept lengths of the draft on the held-out data, into OUT/eval.json",
    "export": "write the draft in the layout of an engine or of another trainer",
}
_DETAILS = {
    "regenerate": (
        'A row holds "messages", answered from the last user turn on, or "prompt", which is one '
        "user turn: the chat template is applied to both. (eagle3-serve generate takes the same "
        'rows, but continues the text of a "prompt" as it stands.)'
    ),
}
_PARALLEL = ("capture", "fit")  # stages that share their work among processes
_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="eagle3-train", description="Train EAGLE-3 drafts.")
    commands = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    for name, summary in _STAGES.items():
        description = f"{summary}. {_DETAILS[name]}" if name in _DETAILS else summary
        command = commands.add_parser(name, help=summary, description=description)
        command.add_argument("config", metavar="CONFIG.yaml")
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="section.key=value",
            help="replaces a value of the file; typed as in YAML",
        )
        command.add_argument(
            "--json", action="store_true", help="print one JSON object on stdout and nothing else"
        )
        if name in _PARALLEL:
            _add_process_options(command)
        if name in ("fit", "plan"):
            command.add_argument(
                "--strategy",
                choices=get_args(StrategyName),
                default="ddp",
                help="how weights and optimiser are spread over processes",
            )
        if name == "capture":
            command.add_argument(
                "--verify", action="store_true", help="read the stored states; replace bad shards"
            )
        if name in ("eval", "export"):
            command.add_argument("--draft", metavar="DIR", help="instead of OUT/draft")
        if name == "export":
            command.add_argument("--to", required=True, choices=list(CONSUMERS), help="for whom")
            command.add_argument("--output", metavar="DIR", help="instead of OUT/export/TO")
        if name == "plan":
            _add_plan_options(command)
    return parser


def _add_process_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--num-processes", type=int, default=1, metavar="P", help="on this machine"
    )
    command.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="machines; each starts this command"
    )
    command.add_argument(
        "--node-rank", type=int, default=0, metavar="R", help="of this machine, from 0"
    )
    command.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="where the machine of --node-rank 0 listens"
    )


def _add_plan_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tokens", type=int, metavar="N", help="of the training data, where it is not there yet"
    )
    command.add_argument(
        "--num-processes", type=int, default=1, metavar="P", help="that share a step"
    )
    command.add_argument(
        "--device",
        choices=["a100", "h100", "h200", "b200"],
        help="at the bf16 rate of its data sheet; this machine, measured, when left out",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parse(argv)
    try:
        config = load_config(options.config, options.overrides)
        if options.stage in _PARALLEL and (status := _start_processes(options, argv)) is not None:
            return status
        return _finish(_run(options, config, argv), options)
    except UserError as error:
        report_error(f"eagle3-train {options.stage}: {error}")
        return 2
    except OSError as error:  # such as a full disk, or a file taken away while it was read
        named = f"{error.filename}: " if error.filename is not None else ""
        report_error(f"eagle3-train {options.stage}: {named}{error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options and overrides in any order, which argparse alone does not allow."""
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides += rest
    for name in ("num_processes", "nodes", "tokens"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}, expected 1 or more")
    return options


def _start_processes(options: argparse.Namespace, argv: Sequence[str]) -> int | None:
    """The exit status of the processes that train; None = this process is the one, or one of them.

    Raises:
        UserError: options that contradict each other, or machines that do not meet.
    """
    alone = options.num_processes == options.nodes == 1
    if alone:
        adopt_step()
    if is_worker():
        follow_parent()
        return None
    machine = _machine(options)
    if alone:
        return None
    if options.nodes == 1 and in_step():
        raise UserError(
            f"--num-processes {options.num_processes} in each task of a SLURM step would be as "
            "many runs; leave it out and let srun start a task a process, or add --nodes, "
            "--node-rank and --rendezvous with a task a machine"
        )
    command = [sys.executable, "-m", "eagle3_train", *argv]
    return launch(command, options.num_processes, machine)


def _machine(options: argparse.Namespace) -> Machine:
    if not 0 <= options.node_rank < options.nodes:
        raise UserError(
            f"--node-rank is {options.node_rank}, expected 0 to {options.nodes - 1}, below --nodes"
        )
    if options.nodes == 1:
        if options.rendezvous is not None:
            raise UserError("--rendezvous without --nodes, expected --nodes 2 or more")
        return Machine()
    host, _, port = (options.rendezvous or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"--rendezvous is {options.rendezvous}, expected HOST:PORT of the machine of "
            "--node-rank 0, the same on all machines"
        )
    return Machine(options.nodes, options.node_rank, host, int(port))


def _run(options: argparse.Namespace, config: TrainConfig, argv: Sequence[str]) -> dict[str, Any]:
    # Torch, transformers and datasets take seconds to import; a mistake in the config does not.
    from transformers.utils import logging  # noqa: PLC0415

    from eagle3_train.stages import (  # noqa: PLC0415
        capture,
        evaluate,
        fit,
        plan,
        prepare,
        regenerate,
    )

    logging.disable_progress_bar()  # the stages have their own
    if options.stage == "prepare":
        return prepare.run_prepare(config)
    if options.stage == "regenerate":
        return regenerate.run_regenerate(config)
    if options.stage == "capture":
        return capture.run_capture(config, options.verify)
    if options.stage == "fit":
        return fit.run_fit(config, ["eagle3-train", *argv], options.strategy)
    if options.stage == "eval":
        return evaluate.run_eval(config, options.draft)
    if options.stage == "export":
        return export(config, options.to, options.draft, options.output)
    return plan.run_plan(
        config,
        tokens=options.tokens,
        num_processes=options.num_processes,
        strategy=options.strategy,
        device=options.device,
    )


def _finish(result: dict[str, Any], options: argparse.Namespace) -> int:
    if os.environ.get("RANK", "0") == "0":
        if options.json:
            print(json.dumps(result))
        elif options.stage in ("eval", "plan"):
            from eagle3_train.tables import eval_table, plan_table  # noqa: PLC0415 - see `_run`

            table = eval_table if options.stage == "eval" else plan_table
            Console(highlight=False).print(table(result))
        else:
            notes = result.pop("notes", ())
            for name, value in result.items():
                print(f"{name}: {_readable(value)}")
            for note in notes:
                print(f"note: {note}")
    return _INTERRUPTED if result.get("interrupted") else 0


def _readable(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " ".join(_readable(item) for item in value)
    return str(value)
