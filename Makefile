.PHONY: demo docs test test-slow test-all lint setup mutants

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --constraint constraints.txt --editable
# A thread per worker: as many workers as cores are busy already. Bytecode is kept, whatever the
# environment says: else each of a thousand processes compiles all modules anew.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

demo: .venv/.demo
	$(BIN)/motley demo

# The pages as a site that needs no server: open site/index.html.
docs: .venv/.docs
	$(BIN)/python docs/build.py site

# For the one who edits: minutes on two cores.
QUICK := (quick or not slow) and not models
test: lint
	$(PYTEST) -m "$(QUICK)"

# What `make test` leaves out: whole crews, many processes, interpreted kernels, real models.
test-slow: setup
	$(PYTEST) -m "not ($(QUICK))"

test-all: lint
	$(PYTEST)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutate.py --jobs 2

setup: .venv/.dev

# What `motley` and its page need, and on top of it the developers' tools.
.venv/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[watch]'
	touch $@

# Without Motley itself: a page needs no torch. The extra `docs` names the same two.
.venv/.docs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt markdown-it-py latex2mathml
	touch $@

.venv/.dev: .venv/.demo
	$(INSTALL) '.[dev]'
	touch $@
