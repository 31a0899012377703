"""A process of the runs in test_strategies.py: trains the chain once for each line of a plan.

argv: a JSON file, [[name of the run, strategy, {fit settings}, run to continue or null], ...].
Weights and metrics land beside it, in a folder a run.
"""

import json
import shutil
import sys
from pathlib import Path

from test_trainer import trainer


def main() -> None:
    plan = Path(sys.argv[1])
    for name, strategy, fit, source in json.loads(plan.read_text(encoding="utf-8")):
        out = plan.parent / name
        if source is not None and not out.exists():  # the second of two processes finds it made
            taken_up = plan.parent / source
            shutil.copytree(taken_up / "checkpoints/step-2", out / "checkpoints/step-2")
            shutil.copy(taken_up / "metrics.jsonl", out)
        run = trainer(out, strategy=strategy, **fit)
        assert run.progress.step == (0 if source is None else 2)
        run.run()
        run.save()


if __name__ == "__main__":
    main()
