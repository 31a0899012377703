"""Command line of eagle3-serve: arguments in, exit status out."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    parser = _Parser(
        prog="eagle3-serve",
        description="Decodes a target model with an EAGLE-3 draft; the output is the target's own.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="answer OpenAI-compatible requests over HTTP",
        description="Answers OpenAI-compatible requests over HTTP until SIGINT or SIGTERM.",
    )
    _add_engine_arguments(serve)
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    serve.add_argument(
        "--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)"
    )
    serve.add_argument("--api-key", type=_not_empty, help="key that clients must send")
    serve.add_argument(
        "--max-queue",
        type=_count(0),
        default=256,
        metavar="N",
        help="requests that may wait; a 503 tells more to come back (default: %(default)s)",
    )
    serve.add_argument(
        "--request-timeout",
        type=_positive,
        metavar="SECONDS",
        help="end a request with a 504 when it takes longer (default: never)",
    )
    serve.add_argument(
        "--tool-call-parser",
        choices=("hermes", "llama3_json"),
        help="how the model marks tool calls; without it, only calls that are forced are served",
    )
    serve.add_argument(
        "--json", action="store_true", help="when ready, print one JSON object on stdout"
    )

    generate = commands.add_parser(
        "generate",
        help="answer a file of prompts",
        description="Answers a file of prompts and reports speed and acceptance.",
    )
    _add_engine_arguments(generate)
    generate.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help='rows {"prompt": text}, continued as it stands, or {"messages": [{"role", "content"}, '
        "...]}, to which the chat template is applied",
    )
    generate.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="the same rows with text, token_ids, finish_reason and token counts",
    )
    generate.add_argument(
        "--max-tokens", type=_count(1), default=256, help="per answer (default: %(default)s)"
    )
    generate.add_argument(
        "--temperature", type=_temperature, default=0.0, help="0 is greedy (default: %(default)s)"
    )
    generate.add_argument(
        "--seed", type=int, help="of row 0; row i uses SEED + i (default: not reproducible)"
    )
    generate.add_argument(
        "--json", action="store_true", help="print the figures as one JSON object on stdout"
    )

    bench = commands.add_parser(
        "bench",
        help="load an OpenAI-compatible server and measure its latencies",
        description="Loads an OpenAI-compatible server with streamed requests, level by level.",
    )
    _add_bench_arguments(bench)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    # Torch and the web framework take seconds to import; --help and typing errors need not wait.
    from eagle3_core import UserError  # noqa: PLC0415
    from eagle3_serve import commands  # noqa: PLC0415

    run = {
        "serve": commands.serve,
        "generate": commands.generate,
        "bench": commands.bench,
    }[arguments.command]
    try:
        run(arguments)
    except UserError as error:
        print(f"eagle3-serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="folder or hub id of the target model")
    parser.add_argument(
        "--draft",
        type=Path,
        metavar="DIR",
        help="the draft's checkpoint; without it, plain decoding",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of target and draft (default: %(default)s)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=_count(0),
        metavar="K",
        help="tokens drafted per round, or depth of a tree; 0 is plain decoding (default: 3 with a "
        "draft)",
    )
    parser.add_argument(
        "--topk",
        type=_count(1),
        metavar="k",
        help="children of a tree's node, and nodes expanded at a depth (default: 1, a chain)",
    )
    parser.add_argument(
        "--num-verify-tokens",
        type=_count(2),
        metavar="N",
        help="rows of a tree that the target verifies, the root included (default: 1 + K * topk)",
    )
    parser.add_argument(
        "--acceptance",
        choices=("coupled", "block"),
        help="of sampled drafts: coupled gives every seed plain decoding's text, block accepts "
        "more of a chain (default: coupled)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=_count(1),
        default=8,
        metavar="B",
        help="requests decoded together (default: %(default)s)",
    )
    parser.add_argument(
        "--max-model-len",
        type=_count(2),
        metavar="TOKENS",
        help="prompt and answer together (default: what the target and the memory allow)",
    )
    parser.add_argument(
        "--kv-cache-gib",
        type=_positive,
        default=4.0,
        metavar="GIB",
        help="bound on the keys and values of target and draft (default: %(default)s)",
    )
    parser.add_argument(
        "--page-size",
        type=_count(1),
        default=16,
        metavar="TOKENS",
        help="of keys and values given out and shared together (default: %(default)s)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=_count(1),
        default=512,
        metavar="TOKENS",
        help="of a round; what decoding leaves of it goes to prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda or cuda:N (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--ops",
        choices=("auto", "reference", "triton"),
        default="auto",
        help="what runs the layers: torch (reference) or Triton kernels (default: triton on a GPU)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="in bfloat16 too, the same text whatever runs beside it; on a CPU, a little slower",
    )


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="of the server, with or without /v1")
    parser.add_argument(
        "--baseline",
        metavar="URL",
        help="of a second server, asked the same in turn: the same target without a draft",
    )
    parser.add_argument("--model", help="to ask for (default: the only one)")
    parser.add_argument("--api-key", type=_not_empty, help="key to send to both")
    parser.add_argument(
        "--concurrency",
        type=_count(1),
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        metavar="N",
        help="levels: clients that each have one request at a time (default: 1 2 4 8 16 32 64)",
    )
    parser.add_argument(
        "--requests-per-client",
        type=_count(1),
        default=4,
        metavar="N",
        help="of a level (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='rows {"prompt"} or {"messages"}, asked in turn (default: built-in questions, of '
        "which no two begin alike)",
    )
    parser.add_argument(
        "--max-tokens", type=_count(1), default=128, help="per answer (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="answers of --max-tokens each; not every server takes it",
    )
    parser.add_argument(
        "--max-seconds",
        type=_positive,
        default=120.0,
        metavar="SECONDS",
        help="start no request of a level later, and end one that takes longer (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as one JSON object on stdout"
    )


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return int(text)

    return parse


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the key is empty")
    return text
