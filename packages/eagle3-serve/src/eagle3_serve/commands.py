"""What the commands of eagle3-serve do."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

from eagle3_core import UserError, load_draft
from eagle3_core.target import Target, load_target
from eagle3_serve.bench import BenchOptions, print_bench, run_bench
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate as decode_all
from eagle3_serve.prompts import read_prompts
from eagle3_serve.sampling import SamplingParams
from eagle3_serve.server import EngineWorker, ServerOptions, create_app, listen, run

_SHAPE = ("num_speculative_tokens", "topk", "num_verify_tokens", "acceptance")
_LIMITS = (
    "max_batch_size",
    "max_model_len",
    "kv_cache_gib",
    "page_size",
    "max_num_batched_tokens",
    "ops",
    "exact",
)
_STDERR = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def serve(args: argparse.Namespace) -> None:
    """Serve until a signal.

    Raises:
        UserError: the address, the target, the draft or their combination cannot be used.
    """
    with listen(args.host, args.port) as listener:
        target, engine = _load(
            args, max_queue_size=args.max_queue, request_timeout_s=args.request_timeout
        )
        worker = EngineWorker(engine)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

        def ready() -> None:
            facts = {"url": url, "host": host, "port": port, "model": target.name}
            if args.json:
                print(json.dumps(facts), flush=True)
            _STDERR.print(f"ready: {url}/v1 serves {target.name}")

        options = ServerOptions(api_key=args.api_key, tool_call_parser=args.tool_call_parser)
        run(create_app(worker, target, options), worker, listener, ready)


def generate(args: argparse.Namespace) -> None:
    """Answer a file of prompts.

    Raises:
        UserError: a file, the target, the draft or their combination cannot be used; nothing has
            been written then.
    """
    rows = read_prompts(args.prompts)
    out = _output(args.out, args.prompts)
    target, engine = _load(args)
    prompts = [row.encode(target.tokenizer) for row in rows]
    params = [
        SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=None if args.seed is None else args.seed + i,
        )
        for i in range(len(rows))
    ]
    for row, prompt, own in zip(rows, prompts, params, strict=True):
        try:
            engine.check(prompt, own)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from error
    with _progress() as progress:
        task = progress.add_task("generate", total=len(rows))
        outputs, figures = decode_all(
            engine, prompts, params, lambda _, ended: progress.advance(task, int(ended))
        )
    results = (
        {**row.values, **asdict(output), "num_prompt_tokens": len(prompt)}
        for row, prompt, output in zip(rows, prompts, outputs, strict=True)
    )
    _write_lines(out, results)
    if args.json:
        print(json.dumps(figures))
    else:
        _print_figures(figures)


def bench(args: argparse.Namespace) -> None:
    """Load a server, and a baseline beside it.

    Raises:
        UserError: a server cannot be used as asked, or the prompts cannot be read.
    """
    rows = None if args.prompts is None else [row.values for row in read_prompts(args.prompts)]
    options = BenchOptions(**{f.name: getattr(args, f.name) for f in fields(BenchOptions)})
    servers = 1 if args.baseline is None else 2
    with _progress() as progress:
        task = progress.add_task("bench", total=options.num_requests * servers)
        results = asyncio.run(
            run_bench(args.url, args.baseline, rows, options, lambda: progress.advance(task))
        )
    if args.json:
        print(json.dumps(results))
    else:
        print_bench(results)


def _load(args: argparse.Namespace, **limits: Any) -> tuple[Target, Engine]:
    """The target and an engine over it, with the draft if one was given, and more limits."""
    shape = {name: getattr(args, name) for name in _SHAPE if getattr(args, name) is not None}
    for name, value in shape.items():
        if args.draft is None and value:
            raise UserError(f"--{name.replace('_', '-')}: needs a draft; give --draft DIR")
    limits |= {name: getattr(args, name) for name in _LIMITS}
    config = EngineConfig(**shape, **limits)
    transformers_logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with _STDERR.status("loading"):
        target = load_target(args.target, dtype, device)
        draft = None
        if args.draft is not None:
            loaded = load_draft(args.draft, target, dtype=dtype)
            draft = loaded.draft.to(device).eval().requires_grad_(False)
            for warning in loaded.report.warnings:
                _STDERR.print(f"warning: {warning}")
        return target, Engine(target, draft, config)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=_STDERR)


def _output(path: Path, prompts: Path) -> Path:
    """The file to write, links followed; found out before any work whether it can be written."""
    try:
        path = path.resolve()
        if path.is_dir():
            raise UserError(f"--out {path}: is a directory, expected a file name")
        if path.exists() and not path.is_file():
            raise UserError(f"--out {path}: is not a regular file, expected one or a new name")
        if path.exists() and path.samefile(prompts):
            raise UserError(f"--out {path}: is the file of prompts, expected another name")
        if not path.parent.is_dir():
            raise UserError(f"--out {path}: {path.parent} is not a directory; create it first")
        partial = _partial(path)
        partial.touch()
        partial.unlink()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise _cannot_write(path, error) from error
    return path


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Whole or not at all: a reader never sees half a file."""
    partial = _partial(path)
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
        partial.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _cannot_write(path: Path, error: Exception) -> UserError:
    return UserError(f"--out {path}: cannot be written: {getattr(error, 'strerror', error)}")


def _print_figures(figures: Mapping[str, Any]) -> None:
    table = Table(show_header=False)
    table.add_row("tokens/s", f"{figures['tokens_per_s']:.1f}")
    table.add_row("tokens", str(figures["num_output_tokens"]))
    table.add_row("accept length", f"{figures['accept_length']:.3f}")
    shares = " ".join(f"{share:.3f}" for share in figures["accepted_per_position"])
    table.add_row("accepted per position", shares or "-")
    table.add_row("rounds", str(figures["num_rounds"]))
    Console(file=sys.stdout, highlight=False).print(table)
