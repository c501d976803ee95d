# Each target makes .venv and installs what it needs on first use, and again after pyproject.toml changes.
# Needs make and a Python of at least 3.11 with venv and pip. To choose one: make test PYTHON=/path/to/python3.12

VENV  := .venv
BIN   := $(VENV)/bin
# The release that the tests run on; pinned, so that an index of CPU builds serves it. The package asks for a range.
TORCH := torch==2.13.0

PYTEST_ARGS ?= -n auto --maxprocesses 8

.PHONY: help figures test test-slow notebooks bench lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make figures    draw every figure of paper_figures/"
	@echo "make test       tests, notebooks and lint"
	@echo "make test-slow  the exhaustive sweeps (many minutes)"
	@echo "make notebooks  run the notebooks from top to bottom"
	@echo "make bench      run the benchmarks"
	@echo "make lint       ruff and mypy;  make format: let ruff rewrite"
	@echo "make clean      remove .venv and caches"

# ---- jobs ----

figures: $(VENV)/installed-figures
	@$(BIN)/python -m paper_figures

# One pytest run over tests, doctests and notebooks, so that its closing line speaks of all of them; then the style.
test: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS) --nbmake tests mxsim $(wildcard notebooks)
	@$(MAKE) --no-print-directory lint

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

notebooks: $(VENV)/installed-dev
	$(BIN)/python -m pytest --nbmake notebooks

bench: $(VENV)/installed-bench
	@set -e; for script in benchmarks/bench_*.py; do echo "$$script"; $(BIN)/python "$$script"; done
	$(BIN)/mxsim bench

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up: a stamp for each set of packages ----

$(VENV)/installed-bench: pyproject.toml | $(VENV)/created
	$(BIN)/python -m pip install --quiet --editable '.[cuda]' '$(TORCH)'
	@touch $@

$(VENV)/installed-figures: pyproject.toml | $(VENV)/created
	$(BIN)/python -m pip install --quiet --editable '.[figures]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/created
	$(BIN)/python -m pip install --quiet --editable '.[dev]' '$(TORCH)'
	@touch $@

# The first of these that runs, is new enough and can make an environment with pip.
$(VENV)/created:
	@set -e; for python in $(or $(PYTHON),python3.12 python3.11 python3 python); do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "making $(VENV) with $$($$python --version)"; \
	    $$python -m venv $(VENV); touch $@; exit 0; \
	  fi; \
	done; \
	echo "error: no Python >= 3.11 with venv and pip among: $(or $(PYTHON),python3.12 python3.11 python3 python);" \
	     "install one (on Debian also python3-venv) or name it: make PYTHON=/path/to/python3.12" >&2; \
	exit 1
