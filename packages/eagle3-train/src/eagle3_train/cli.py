"""`eagle3-train`: one command a stage. Bad input ends with one line and exit status 2."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from eagle3_core import UserError
from eagle3_train.config import TrainConfig, load_config
from eagle3_train.launch import is_worker, launch, report_error

_STAGES = {
    "prepare": "show what the data becomes: one example coloured, counts, rows left out",
    "regenerate": "let the target answer regenerate.prompts into OUT/regenerated.jsonl",
    "capture": "run the target over the data once and store its states in OUT/features",
    "fit": "train the draft into OUT/draft; continues an interrupted run",
    "eval": "simulated accept lengths of the draft on the held-out data, into OUT/eval.json",
}
_PARALLEL = ("capture", "fit")  # stages that share their work among processes
_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="eagle3-train", description="Train EAGLE-3 drafts.")
    commands = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    for name, summary in _STAGES.items():
        command = commands.add_parser(name, help=summary, description=summary)
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
            command.add_argument(
                "--num-processes", type=int, default=1, metavar="P", help="on this machine"
            )
        if name == "fit":
            command.add_argument("--strategy", choices=["ddp"], default="ddp")
        if name == "capture":
            command.add_argument(
                "--verify", action="store_true", help="read the stored states; replace bad shards"
            )
        if name == "eval":
            command.add_argument("--draft", metavar="DIR", help="instead of OUT/draft")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parse(argv)
    try:
        config = load_config(options.config, options.overrides)
        if options.stage in _PARALLEL and options.num_processes > 1 and not is_worker():
            return launch(argv, options.num_processes)
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
    if options.stage in _PARALLEL and options.num_processes < 1:
        parser.error(f"--num-processes is {options.num_processes}, expected 1 or more")
    return options


def _run(options: argparse.Namespace, config: TrainConfig, argv: Sequence[str]) -> dict[str, Any]:
    # Torch, transformers and datasets take seconds to import; a mistake in the config does not.
    from transformers.utils import logging  # noqa: PLC0415

    from eagle3_train import stages  # noqa: PLC0415

    logging.disable_progress_bar()  # the stages have their own
    if options.stage == "prepare":
        return stages.run_prepare(config)
    if options.stage == "regenerate":
        return stages.run_regenerate(config)
    if options.stage == "capture":
        return stages.run_capture(config, options.verify)
    if options.stage == "fit":
        return stages.run_fit(config, ["eagle3-train", *argv])
    return stages.run_eval(config, options.draft)


def _finish(result: dict[str, Any], options: argparse.Namespace) -> int:
    if os.environ.get("RANK", "0") == "0":
        if options.json:
            print(json.dumps(result))
        elif options.stage == "eval":
            from eagle3_train.tables import eval_table  # noqa: PLC0415 - see `_run`

            Console(highlight=False).print(eval_table(result))
        else:
            for name, value in result.items():
                print(f"{name}: {_readable(value)}")
    return _INTERRUPTED if result.get("interrupted") else 0


def _readable(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " ".join(_readable(item) for item in value)
    return str(value)
