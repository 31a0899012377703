#!/usr/bin/env bash
# Run every benchmark of benchmarks/; what each prints, one JSON object, goes to runs/bench.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p runs/bench
for file in benchmarks/*.py; do
    result="runs/bench/$(basename "$file" .py).json"
    printf '%s -> %s\n' "$file" "$result"
    python "$file" >"$result.part"
    mv "$result.part" "$result"
done
