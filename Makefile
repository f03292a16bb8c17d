.PHONY: demo test setup lint mutants

PYTHON ?= python3
BIN := .venv/bin

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/motley demo

test: setup lint
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutate.py --jobs 2
