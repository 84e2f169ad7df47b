# One command each, from a fresh clone: Python 3.10 or newer is all that must be there.
#
#   make demo         the demo on a real model (RUN="--tiny" for a random one, RUN="--help" for the options)
#   make test         the fast tests            (ARGS="-k tree" goes to pytest)
#   make test-slow    the tests that need the real model or minutes
#   make docs         the site, into site/: open site/index.html, it needs no server and no network
#   make test-browser the site in a headless Chromium (Debian: apt install chromium)
#   make lint types bench all clean
#
# PYTHON=python3.12 picks the interpreter, VENV=dir the environment's folder, EXTRAS=demo,docs,dev,cuda the extras.

PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= dev
ARGS   ?=
RUN    ?=

BIN := $(VENV)/bin
# torch spins on every core by default, which makes small models slower, not faster.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# What is installed is named by what was asked for: a change of either file installs again, nothing else does.
HASH  := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(EXTRAS)-$(HASH)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-browser lint format types docs bench all clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed-demo-$(HASH)
	@$(BIN)/radixkv demo $(RUN)

test: $(STAMP)
	$(BIN)/python -m pytest -n auto $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow -n auto $(ARGS)

test-browser: $(STAMP)
	$(BIN)/python -m pytest -m browser -n 0 tests/browser $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/interrogate radixkv
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

bench: $(STAMP)
	$(BIN)/python -m pytest benchmarks/bench_core.py $(ARGS)

all: test lint types docs

clean:
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks

# `demo` needs less than the rest, and an environment that has the rest has it too.
$(VENV)/.installed-%-$(HASH): | $(BIN)/python
	@echo "installing radixkv[$*] into $(VENV) (some minutes the first time)"
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@rm -f $(VENV)/.installed-$*-*
	@touch $@
	@case ',$*,' in *,dev,*) touch $(VENV)/.installed-demo-$(HASH);; esac

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "error: radixkv needs Python 3.10 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1):" \
	       "run make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot make environments: install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
