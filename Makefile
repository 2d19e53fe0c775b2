# make demo, make test and make check each work in a fresh clone: they make .venv, install into it, and run.
# PYTHON=python3.12 chooses the interpreter of a new .venv, and TORCH=cpu, default or the URL of an index its build of torch;
# ARGS="..." goes to the program or to pytest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

OLDEST := (3, 11)
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < $(OLDEST))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
TORCH ?= auto
BIN := .venv/bin
PATHS := src tests tools lab $(wildcard examples)
# two processes side by side, one thread each (tests/conftest.py)
PYTEST := $(BIN)/pytest -q -n 2 --dist worksteal

.PHONY: help venv demo test test-slow check lint types doctest docs gate format

help:
	@echo 'make demo       set up, then train a small model on this machine'
	@echo 'make test       set up, then run the tests'
	@echo 'make test-slow  the tests that take minutes'
	@echo 'make check      the gate: linter, formatter, type checker, doctests, documents, tests'
	@echo 'make docs       the documentation site, in site/'
	@echo 'make format     mend what the linter and the formatter can mend'
	@echo 'make venv       set up only'

venv: .venv/ready

# .venv/package: the package alone; .venv/ready: the developer's tools too
.venv/package .venv/ready: pyproject.toml constraints.txt
	@if [ -z '$(PYTHON)' ] || ! '$(PYTHON)' -c '$(IS_NEW_ENOUGH)'; then \
		echo "Headrace needs Python 3.11 or newer; found: $$('$(or $(PYTHON),python3)' --version 2>&1 || true)." >&2; \
		echo 'Install one and name it: make venv PYTHON=/path/to/python3.11' >&2; \
		exit 1; \
	fi
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "Making .venv with $$('$(PYTHON)' --version)"; rm -rf .venv; '$(PYTHON)' -m venv .venv; \
	fi
	@$(BIN)/python tools/install.py --torch '$(TORCH)' $(if $(filter %ready,$@),dev)
	@touch $@

# the package alone is enough, and needs no compiler
demo: $(if $(wildcard .venv/ready),.venv/ready,.venv/package)
	$(BIN)/headrace demo $(ARGS)

test: venv
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: venv
	$(PYTEST) -m slow --timeout 1800 $(ARGS)

# The cheap checks stand first; `make check test` runs the tests once.
check: lint types doctest docs test

lint: venv
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)

types: venv
	$(BIN)/mypy

doctest: venv
	$(BIN)/pytest -q --doctest-modules src/headrace --ignore=src/headrace/learner/low_bit.py  # needs torchao

# The documentation site, into site/: warnings, links and anchors that lead nowhere, and pages that would fetch anything
# from another host are errors. No network is used.
docs: venv
	$(BIN)/python -m tools.site

# The house's own rules alone: sizes, imports, owners, words. They are part of `make test` too.
gate: venv
	$(BIN)/python -m tools.gate
	$(BIN)/pytest -q tests/gate

format: venv
	$(BIN)/ruff check --fix $(PATHS)
	$(BIN)/ruff format $(PATHS)
