SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(CURDIR)/.venv-uv/bin:$(PATH)

METADATA := pyproject.toml $(wildcard packages/*/pyproject.toml) uv.lock
SYNCED := .venv/synced
PYTHON_CODE := packages scripts demo benchmarks tests interop

.PHONY: help
help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: sync
sync: $(SYNCED) ## Create .venv with the locked versions (installs uv first where it is missing)

# uv writes download addresses back into uv.lock; they are stripped at once, so that the working
# copy equals the committed file. The git filter does the same for whoever runs uv by hand.
$(SYNCED): $(METADATA)
	@uv --version >/dev/null 2>&1 || { python3 -m venv .venv-uv && .venv-uv/bin/python -m pip install --quiet uv; }
	@! git rev-parse --git-dir >/dev/null 2>&1 || git config filter.uvlock.clean "python3 scripts/lock.py --clean"
	uv sync
	@.venv/bin/python scripts/lock.py --strip
	@touch $@

.PHONY: lint
lint: sync ## Lint and check the format
	ruff check $(PYTHON_CODE)
	ruff format --check $(PYTHON_CODE)

.PHONY: type
type: sync ## Check the types
	basedpyright

.PHONY: arch
arch: sync ## Check who may import whom
	lint-imports --no-cache

.PHONY: lock
lock: sync ## Check that the committed lock is fresh and holds no address
	python scripts/lock.py --check

.PHONY: wheels
wheels: sync ## Build each package and import all of it from its wheel alone
	scripts/wheels.sh

# Tests use tiny models, on which threads cost more than they give.
.PHONY: test
test: sync ## Run the whole CPU test suite
	@OMP_NUM_THREADS=1 pytest

# Not part of the test suite: the peers weigh gigabytes, and vLLM needs the draft that the demo trains.
.PHONY: interop
interop: interop-peers ## Check against SpecForge, speculators and vLLM themselves (after make demo)
	@scripts/interop.sh vllm

.PHONY: interop-peers
interop-peers: sync ## The half of it that needs no vLLM and no trained draft
	@scripts/interop.sh peers

.PHONY: demo
demo: sync ## Train a draft for a real 135M target, serve with it, print the speed-up (15 minutes)
	@python demo/run.py demo/demo.yaml

.PHONY: demo-long
demo-long: sync ## The same with more data and more training (about an hour)
	@python demo/run.py demo/demo-long.yaml

.PHONY: bench
bench: sync ## Run every benchmark; JSON goes to runs/bench
	@scripts/bench.sh

.PHONY: docs
docs: sync ## Write docs/cli.md from the commands' parsers
	python scripts/docs.py

.PHONY: ci
ci: ## Everything that continuous integration runs
	.ci/run
