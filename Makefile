# make quickstart: a trained model in a few minutes. make test: every part. make test-whole: the whole. make lint: style and types.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: install quickstart tools test test-whole lint format docs bench clean

install: $(VENV)/.run
$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "raydist needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.run
	$(BIN)/pip install -q -c constraints.txt -e '.[lint]'
	@touch $@

quickstart: $(VENV)/.run
	@mkdir -p runs/.data  # makes ./runs the storage of each command here, unless the user's environment or configuration names another
	$(BIN)/raydist train jobs/quickstart.yaml $(STORAGE:%=--storage %)
	$(BIN)/raydist show quickstart $(STORAGE:%=--storage %)
	$(BIN)/raydist sample quickstart $(STORAGE:%=--storage %)

# What some tests need beside Python: installed where this user may, else those tests are skipped and listed.
tools: $(VENV)/.test
	@$(BIN)/python -m tests.needs

WHOLE := tests/end_to_end tests/faults
test: $(VENV)/.test tools
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests $(WHOLE:%=--ignore %) $(PYTEST_ARGS)
test-whole: $(VENV)/.test tools
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WHOLE) $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.run
	$(BIN)/python docs/generate.py

bench: $(VENV)/.run
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/steady.py

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
