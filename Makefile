# The commands people type; CI types the same ones. Needs only python3 (3.10 or newer) with venv, and make.
#
#   make test ARGS="-x -k deadline"                          pass arguments on
#   make test TORCH=torch==2.13.0 VENV=.venv-torch-2.13.0    another torch, kept beside the usual one

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch
ARGS   ?=
COVERAGE ?= yes

# Bytecode goes into our own environment only, and without it every process compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE
export TELEGRAD_BENCH_PEERS ?= $(CURDIR)/.venv-peers

BIN := $(VENV)/bin
# uv where there is a working one, otherwise a copy inside the environment.
UV  := $(shell uv --version >/dev/null 2>&1 && echo uv || echo $(BIN)/uv)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-gpu test-frameworks check lint types public-types layers workflows bench bench-peers conformance docs dist release clean FORCE

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-examples  ## one server and two trainers on this machine learn handwritten digits
	$(BIN)/telegrad train mnist $(ARGS)

# Child processes are measured, too. COVERAGE=no takes a quarter of the time less.
test: $(VENV)/.installed-dev  ## every test that this machine can run, and how much of the package they run
ifeq ($(COVERAGE),no)
	$(BIN)/python -m pytest $(ARGS)
else
	rm -rf build/coverage
	$(BIN)/python -m coverage run -m pytest $(ARGS)
	$(BIN)/python scripts/coverage_report.py
endif

test-slow: $(VENV)/.installed-dev  ## the tests that take minutes: soaks, storms of signals and kills, large messages
	$(BIN)/python -m pytest -m soak $(ARGS)

test-gpu: $(VENV)/.installed-dev $(VENV)/.installed-conformance  ## the tests that need a GPU, and those of PyTorch's suites
	$(BIN)/python -m pytest -m gpu $(ARGS)
	$(BIN)/python tests/conformance/run.py -j 4 --limit 60 -k Cuda

# An environment of its own: these packages bring many others along.
test-frameworks:  ## training loops of Hugging Face, Lightning and accelerate
	$(MAKE) VENV=.venv-frameworks .venv-frameworks/.installed-frameworks
	.venv-frameworks/bin/python -m pytest tests/frameworks $(ARGS)

check: lint types public-types layers workflows  ## lint, format, types, layers, workflows: each is also a command of its own

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python tests/repository/typing

public-types: $(VENV)/.installed-dev  ## what pyright does not know about the types of the public names
	$(BIN)/python scripts/public_types.py

layers: $(VENV)/.installed-dev
	$(BIN)/lint-imports

workflows: $(VENV)/.installed-dev $(VENV)/.tried-actionlint
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	@if test -x $(BIN)/actionlint; then echo $(BIN)/actionlint; PATH="$(BIN):$$PATH" $(BIN)/actionlint; \
	else echo 'actionlint: not run, could not be installed'; test -z "$$GITHUB_ACTIONS"; fi

bench: $(VENV)/.installed-bench  ## measure this machine; ARGS="--full" for everything
	$(BIN)/telegrad bench $(ARGS)

bench-peers: $(VENV)/.installed-bench  ## environments for the peers that are measured beside Telegrad
	$(BIN)/telegrad bench peers $(ARGS)

conformance: $(VENV)/.installed-conformance  ## PyTorch's own RPC test suites, run against this package
	$(BIN)/python tests/conformance/run.py $(ARGS)

docs: $(VENV)/.installed-docs  ## API reference into site/
	$(BIN)/pdoc telegrad -o site $(ARGS)

dist: $(VENV)/.installed-dev  ## sdist and wheel into dist/, checked and installed into a fresh environment
	$(BIN)/python scripts/release.py --uv $(UV) build

release: $(VENV)/.installed-dev  ## check, build and tag: make release VERSION=1.2.3; ARGS=--dry-run makes no tag
	$(BIN)/python scripts/release.py --uv $(UV) tag $(or $(VERSION),$(error VERSION=1.2.3 is missing)) $(ARGS)

clean:  ## remove the environment, caches and everything built
	rm -rf $(VENV) .venv-frameworks .venv-peers build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- Bootstrap: each stamp file says "this is installed"; pyproject.toml or another TORCH makes it stale ---------------

$(BIN)/python:
ifeq ($(UV),uv)
	uv venv --quiet --python $(PYTHON) $(VENV)
else
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
endif

# Rewritten only when TORCH is not what it was.
$(VENV)/.torch: FORCE | $(BIN)/python
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(UV) pip install --python $(BIN)/python --upgrade-package torch --editable . '$(TORCH)'
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(UV) pip install --python $(BIN)/python --editable '.[$*]'
	@touch $@

# Its build downloads a program from github.com. Machines that cannot reach it check workflows by their schemas alone.
$(VENV)/.tried-actionlint: $(VENV)/.installed
	@$(UV) pip install --quiet --python $(BIN)/python --editable '.[actionlint]' 2>/dev/null || true
	@touch $@
