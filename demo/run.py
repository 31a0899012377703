"""Train a draft for a real target, decode with it, and show what it is worth on this machine.

    demo/run.py CONFIG.yaml

Runs the commands that a user would run, one after the other: regenerate (training prompts, then the
held-out ones), capture, fit, eval. Each of them skips what it has already finished. Then held-out
prompts are answered in this process, with and without the draft, one request at a time.
Exit status: 0, or 1 when a stage failed or a single answer differs.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from compare import Comparison, compare
from rich.console import Console
from rich.table import Table

from eagle3_core import UserError
from eagle3_train.config import TrainConfig, load_config

HELDOUT = Path("demo/heldout.jsonl")
NUM_PROMPTS = 32  # answered twice, one after the other: the longest stage after training
MAX_TOKENS = 64
BIN = Path(sys.executable).parent

console = Console(highlight=False)


def stages(config_path: str, config: TrainConfig) -> list[tuple[str, list[str]]]:
    """What each stage is for, and its command."""
    train = str(BIN / "eagle3-train")
    # The same command answers the held-out prompts, into a folder of its own.
    heldout = [
        f"output={config.out / 'heldout'}",
        f"regenerate.prompts=[{HELDOUT}]",
        "regenerate.samples_per_prompt=1",
        "regenerate.temperature=0.0",
        "regenerate.dtype=float32",  # as they are served
    ]
    return [
        ("the target answers the training prompts", [train, "regenerate", config_path]),
        ("the target answers the held-out prompts", [train, "regenerate", config_path, *heldout]),
        ("the target's states for every answer", [train, "capture", config_path]),
        ("training the draft", [train, "fit", config_path]),
        ("accept length on held-out answers, simulated", [train, "eval", config_path]),
    ]


def run_stage(number: int, total: int, title: str, command: list[str]) -> bool:
    """Run one command in this terminal; whether it succeeded."""
    console.rule(f"[bold]{number}/{total}  {title}", align="left")
    shown = [Path(command[0]).name, *command[1:]]
    console.print(f"$ {shlex.join(shown)}", style="dim", markup=False, soft_wrap=True)
    start = time.perf_counter()
    status = subprocess.run(command).returncode
    console.print(f"{time.perf_counter() - start:.0f} s", style="dim")
    if status:
        console.print(f"stopped: {shlex.join(shown)} ended with status {status}", style="red")
    return status == 0


def show(result: Comparison) -> None:
    """The table."""
    table = Table(title=f"{result.num_prompts} held-out prompts, fp32, greedy, one at a time")
    for column in ["", "target alone", f"with the draft, K={result.num_speculative_tokens}"]:
        table.add_column(column, justify="right" if column else "left")
    plain, draft = result.plain_tokens_per_s, result.draft_tokens_per_s
    table.add_row("tokens/s", f"{plain:.1f}", f"{draft:.1f}")
    table.add_row("ratio", "1.00", f"[bold]{draft / plain:.2f}")
    table.add_row("accept length", "1.00", f"[bold]{result.accept_length:.2f}")
    for position, rate in enumerate(result.acceptance_per_position, 1):
        table.add_row(f"position {position} accepted", "", f"{100 * rate:.1f} %")
    console.print(table)
    console.print(f"identical outputs: {result.num_identical} of {result.num_prompts}")


def show_next_steps(config: TrainConfig, num_speculative_tokens: int) -> None:
    """Commands that work as they stand, for a shell in this folder."""
    serve = (
        f"{BIN.relative_to(Path.cwd()) if BIN.is_relative_to(Path.cwd()) else BIN}/eagle3-serve "
        f"serve {config.target} --draft {config.out / 'draft'} "
        f"--num-speculative-tokens {num_speculative_tokens}"
    )
    curl = (
        "curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{config.target}", "temperature": 0, "max_tokens": 64, '
        '"messages": [{"role": "user", "content": "Why is the sky blue?"}]}\''
    )
    console.print("\nServe it, and ask it from another terminal:\n")
    for line in [serve, curl]:
        console.print(line, markup=False, soft_wrap=True)


def main() -> int:
    """Run every stage that is not finished; print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG.yaml")
    config_path = parser.parse_args().config
    start = time.perf_counter()
    try:
        config = load_config(config_path)
        planned = stages(config_path, config)
        total = len(planned) + 1
        for number, (title, command) in enumerate(planned, 1):
            if not run_stage(number, total, title, command):
                return 1
        console.rule(f"[bold]{total}/{total}  with and without the draft", align="left")
        result = compare(config.target, config.out, HELDOUT, NUM_PROMPTS, MAX_TOKENS, console)
    except UserError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    show(result)
    console.print(f"{(time.perf_counter() - start) / 60:.1f} minutes")
    if result.num_identical != result.num_prompts:
        console.print(f"answers differ: {', '.join(result.different)}", style="red")
        return 1
    show_next_steps(config, result.num_speculative_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
