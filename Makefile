# Every target sets up what it needs in .venv; nothing outside the checkout is touched but pip's cache.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help
.PHONY: help install demo test check lint types clean

help:
	@echo "make demo    multi-turn conversations through HBM, host memory and disk, against recomputation"
	@echo "make test    the test suite (no GPU, no network, under 3 minutes)"
	@echo "make check   formatting, lint, types, then the test suite"
	@echo "make clean   remove .venv and caches"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	@echo "setting up $(VENV) (once; about 2 minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-cpu.txt \
		-e ".[dev]"
	@touch $@

demo: install
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(BIN)/tiered-kv replay --config examples/demo.toml --disk "$$folder/kv"

test: install
	$(BIN)/python -m pytest

check: lint types test

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
