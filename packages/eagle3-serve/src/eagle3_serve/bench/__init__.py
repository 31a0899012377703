"""Load against an OpenAI-compatible endpoint, and what it says about speed."""

from eagle3_serve.bench.load import BenchOptions, run_bench
from eagle3_serve.bench.table import print_bench

__all__ = ["BenchOptions", "print_bench", "run_bench"]
