# Every target makes what it needs: `make quickstart` and `make test` work from a fresh clone.
# PYTHON names the interpreter (3.11 or newer) that the virtual environment is made with.
PYTHON ?= python3
VENV ?= .venv
WORKSPACE ?= quickstart
# one more than there are cores: tests wait for servers, disks and processes
JOBS ?= $(shell $(PYTHON) -c 'import os; print(1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))')

BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed
STAMP := $(VENV)/.installed-dev

PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check
timed = echo "$(1)"; begin=$$(date +%s); $(1) && \
  echo "Installed in $$(( $$(date +%s) - begin )) s; $(VENV) takes $$(du -sh $(VENV) | cut -f1)."

BENCH := .venv-bench
BENCH_STAMP := $(BENCH)/.installed

RELEASE := .venv-release
RELEASE_STAMP := $(RELEASE)/.installed

.PHONY: help install install-dev quickstart test test-slow check docs site bench-env bench release clean
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(RUN_STAMP) ## Make the virtual environment .venv with what running needs, pinned

install-dev: $(STAMP) ## Add the development tools to it

$(RUN_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "bertvision needs Python 3.11 or newer, and '$(PYTHON)' is none:" \
	    "name one with  make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Installing what running needs into $(VENV): about 0.5 GB to download" \
	  "(several GB where pip takes PyTorch's build for CUDA)."
	$(PYTHON) -m venv $(VENV)
	@$(call timed,$(PIP_INSTALL) --editable '.[quickstart]' --constraint constraints.txt)
	@touch $@

$(STAMP): $(RUN_STAMP)
	@echo "Adding the development tools to $(VENV): about 0.1 GB to download."
	@$(call timed,$(PIP_INSTALL) --editable '.[dev]' --constraint constraints.txt)
	@touch $@

quickstart: $(RUN_STAMP) ## Run the whole main job on a small built-in example (WORKSPACE=folder)
	$(BIN)/bertvision quickstart --workspace $(WORKSPACE)

# the tests start many processes: bytecode is compiled once, whatever the shell says
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) ## Run the tests, in one process more than there are cores (JOBS=number)
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(JOBS) --dist loadfile \
	  --no-loadscope-reorder

test-slow: $(STAMP) ## Run the larger variants of the tests
	$(BIN)/python -m pytest -m slow

check: $(STAMP) site ## Lint, format, types, import contracts, contents of the wheel, links of the site
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy docs/*.py
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_packaging.py -k wheel

docs: $(STAMP) ## Write what is generated in docs/: commands, tables of results, API, errors
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_results.py

site: $(STAMP) ## Build the site of the documentation in site/; a broken link is an error
	# links to the package's own folders: to the whole clone, the builder would walk .venv many times
	rm -rf .cache/site && mkdir -p .cache/site/bertvision
	ln -s $(CURDIR)/*.py $(addprefix $(CURDIR)/,featurestore jobs models pipelines) .cache/site/bertvision
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench-env: $(BENCH_STAMP) ## Make .venv-bench: bertvision and the peers of the benchmarks

$(BENCH_STAMP): pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --disable-pip-version-check \
	  --editable '.[dev]' --constraint constraints.txt
	$(BENCH)/bin/python -m pip install --disable-pip-version-check --no-deps \
	  --requirement benchmarks/requirements.txt
	@touch $@

bench: $(BENCH_STAMP) ## Run the benchmarks (an hour), then write tables and figures of docs/performance.md
	for name in loader tokens pooled extract epoch scale compression predict; do \
	  $(BENCH)/bin/python benchmarks/$$name.py --json docs/performance/$$name.json || exit 1; \
	done
	$(BENCH)/bin/python docs/generate_figures.py

$(RELEASE_STAMP): .ci/requirements.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --disable-pip-version-check --requirement .ci/requirements.txt
	@touch $@

release: $(RELEASE_STAMP) ## Build and check wheel and sdist, try them on oldest and newest dependencies
	PYTHON=$(PYTHON) TOOLS=$(RELEASE) .ci/release

clean: ## Remove caches and build products; the environment and workspaces stay
	rm -rf build dist site .cache *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path './.venv*' -prune -o -path ./.dev -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
