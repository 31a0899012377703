#!/usr/bin/env bash
# Build every package and import all of its modules in an environment that holds its wheel, the
# core wheel it depends on and nothing else of this workspace. A dependency that is used but not
# declared, or a file that the wheel lacks, fails here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dist="$(mktemp -d)"
trap 'rm -rf "$dist"' EXIT

# The versions of .venv, so that nothing is downloaded that `make sync` has not downloaded.
uv pip freeze --quiet --exclude-editable >"$dist/constraints.txt"

for package in eagle3-core eagle3-train eagle3-serve; do
    uv build --quiet --wheel --package "$package" --out-dir "$dist"
done

core=("$dist"/eagle3_core-*.whl)
for module in eagle3_core eagle3_train eagle3_serve; do
    wheel=("$dist/$module"-*.whl)
    with=()
    if [ "$module" != eagle3_core ]; then with=(--with "${core[0]}"); fi
    uvx --isolated --constraints "$dist/constraints.txt" --from "${wheel[0]}" "${with[@]}" \
        python -I scripts/import_all.py "$module"
done
