"""The `eagle3-core` command: inspect, convert and diff draft checkpoints."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from eagle3_core.checkpoint import DESTINATIONS, describe
from eagle3_core.checkpoint.consumers import CONSUMERS
from eagle3_core.checkpoint.export import export_tensors
from eagle3_core.checkpoint.read import Reading, common_dtype, plan_reading, read_tensors
from eagle3_core.checkpoint.show import show
from eagle3_core.errors import UserError

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; -> exit status (2 for a user's mistake, 1 when a diff is found)."""
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UserError as error:
        print(f"eagle3-core {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    parser = argparse.ArgumentParser(prog="eagle3-core", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="say what a checkpoint is, and who can serve it")
    inspect.add_argument("checkpoint", type=Path)
    inspect.add_argument("--scan", action="store_true", help="look for NaN and inf in all weights")
    inspect.set_defaults(run=_inspect)

    convert = commands.add_parser("convert", help="write a checkpoint in another layout")
    convert.add_argument("source", type=Path)
    convert.add_argument("destination", type=Path)
    convert.add_argument("--to", required=True, choices=DESTINATIONS)
    convert.set_defaults(run=_convert)

    diff = commands.add_parser("diff", help="say whether two checkpoints are the same function")
    diff.add_argument("a", type=Path)
    diff.add_argument("b", type=Path)
    diff.set_defaults(run=_diff)

    for command in (inspect, convert):
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="what you know better than the file: a config field, rope_theta, "
            "aux_layer_id_convention or d2t=identity",
        )
    for command in (inspect, convert, diff):
        command.add_argument("--target", help="the target: a folder or a name")
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _overrides(settings: Sequence[str]) -> dict[str, Any]:
    """key=value pairs; values are JSON where they parse, a comma list where there are commas."""
    out: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise UserError(f"--set {setting!r}: expected KEY=VALUE")
        out[key] = _value(text)
    return out


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [_value(part.strip()) for part in text.split(",")] if "," in text else text


def _inspect(arguments: argparse.Namespace) -> int:
    reading = plan_reading(arguments.checkpoint, arguments.target, _overrides(arguments.set))
    if arguments.target:
        size = _tokenizer_size(arguments.target)
        reading.report.warnings.extend(describe.check_target_tokens(reading, size))
    if arguments.scan:
        _scan(reading)
    if arguments.json:
        print(json.dumps({**describe.to_json(reading), "scanned": arguments.scan}))
    else:
        show(reading, scanned=arguments.scan)
    return 0


def _tokenizer_size(target: str) -> int:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds that only --target needs

    try:
        return len(AutoTokenizer.from_pretrained(target, local_files_only=Path(target).is_dir()))
    except (OSError, ValueError) as error:
        line = str(error).splitlines()[0]
        raise UserError(f"target {target}: tokenizer cannot be loaded: {line}") from None


def _scan(reading: Reading) -> None:
    files = reading.files
    total = sum(files.tensors[name].num_bytes for name in reading.names.values())
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("scanning", total=total)
        for _, num_bytes in describe.scan(reading):
            progress.advance(task, num_bytes)


def _convert(arguments: argparse.Namespace) -> int:
    overrides = _overrides(arguments.set)
    reading = plan_reading(arguments.source, arguments.target, overrides)
    if arguments.destination.exists():
        raise UserError(f"{arguments.destination}: exists; choose another folder or remove it")
    tensors = read_tensors(reading)
    dtype = common_dtype(tensors, reading.report)
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    export_tensors(
        reading.config,
        tensors,
        arguments.destination,
        arguments.to,
        target_name=arguments.target,
        identity_map=True,  # an unset map has been refused by the reader
    )
    consumer = CONSUMERS.get(arguments.to)
    _say(
        arguments,
        {
            "path": str(arguments.destination),
            "to": arguments.to,
            **reading.report.to_dict(),
            "notes": list(consumer.notes) if consumer else [],
        },
    )
    return 0


def _say(arguments: argparse.Namespace, result: Mapping[str, Any]) -> None:
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{result['path']}: written for {result['to']} (from a {result['dialect']} checkpoint)")
    for kind in ("warnings", "notes"):
        for line in result[kind]:
            print(f"{kind[:-1]}: {line}")


def _diff(arguments: argparse.Namespace) -> int:
    found = describe.diff(arguments.a, arguments.b, arguments.target)
    if arguments.json:
        print(json.dumps({"same": not found, "differences": [vars(d) for d in found]}))
    elif not found:
        print("the same function")
    else:
        for difference in found:
            print(difference)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
