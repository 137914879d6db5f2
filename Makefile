# Everything runs in .venv, made on first use and brought up to date when pyproject.toml changes.
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.installed
CHECK := $(VENV)/.installed-test
WORKERS ?= auto
# Compilers for GPUs that are absent (Linux only). Not in .venv itself: there JAX would look for a GPU at every start.
AOT := $(VENV)/gpu-aot
AOT_TOOLS := 'nvidia-cuda-nvcc>=13,<14' 'nvidia-nvvm>=13,<14'
VERSION_OF_JAX := import importlib.metadata; print(importlib.metadata.version('jax'))
PYTHONS := $(PYTHON) python3.14 python3.13 python3.12 python3
RECENT := import sys; sys.exit(sys.version_info < (3, 12))

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow lint typecheck bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

venv: $(CHECK)  ## make the environment in .venv

$(RUN): pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	    found=; for python in $(PYTHONS); do \
	        $$python -c '$(RECENT)' >/dev/null 2>&1 && { found=$$python; break; }; \
	    done; \
	    test -n "$$found" || { \
	        echo "No Python 3.12 or newer among: $(PYTHONS)." \
	             "Install one, or name it: make venv PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	    echo "Making $(VENV) with $$($$found --version)"; \
	    $$found -m venv $(VENV) || { rm -rf $(VENV); \
	        echo "$$found cannot make virtual environments: install its venv package (Debian: python3-venv)" >&2; \
	        exit 1; }; }
	@echo "Installing into $(VENV): minutes the first time"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[cpu]'
	@touch $@

$(CHECK): $(RUN)
	@echo "Installing the tools for tests into $(VENV)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[test]'
	@test "$$(uname -s)" != Linux || { echo "Installing the compilers for absent GPUs into $(AOT)"; rm -rf $(AOT); \
	    $(BIN)/python -m pip install -qq --disable-pip-version-check --target $(AOT) $(AOT_TOOLS) \
	        "jax-cuda13-plugin==$$($(BIN)/python -c "$(VERSION_OF_JAX)")"; }
	@touch $@

demo: $(RUN)  ## fetch the demo model and generate for several prompts at once
	@$(BIN)/jaxpaged demo

test: lint typecheck  ## lint, type-check and run the tests
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-slow: $(CHECK)  ## run the slow tests
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

lint: $(CHECK)  ## ruff and the import contract
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

typecheck: $(CHECK)  ## pyright
	$(BIN)/pyright

bench: $(RUN)  ## throughput and latency on the demo model
	$(BIN)/python -m scripts.bench

clean:  ## remove caches and build products; .venv stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
