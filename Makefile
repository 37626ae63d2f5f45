# make quickstart: a trained model in a few minutes. make test: all tests. make lint: style and types.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: install quickstart tools test test-whole test-image fuzz lint format docs site bench clean

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

$(VENV)/.docs: $(VENV)/.run
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

quickstart: $(VENV)/.run
	@mkdir -p runs/.data  # makes ./runs the storage of each command here, unless the user's environment or configuration names another
	$(BIN)/raydist train jobs/quickstart.yaml $(STORAGE:%=--storage %)
	$(BIN)/raydist show quickstart $(STORAGE:%=--storage %)
	$(BIN)/raydist sample quickstart $(STORAGE:%=--storage %)

# Installs the tools that some tests need beside Python, where this user may; else those tests are skipped and listed.
tools: $(VENV)/.test
	@$(BIN)/python -m tests.needs

# All tests, two files at a time (tests/scheduling.py); -n 3 adds a process for files that mostly wait. With PYTEST_ARGS, such as "-k name -x" or "--lf", no tools are installed.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(if $(CI),--durations=25)
test: $(VENV)/.test $(if $(PYTEST_ARGS),,tools)
	$(PYTEST) -n 2 tests $(PYTEST_ARGS)

# Of these only the whole command: on a private Ray, on clusters, on several hosts, under every fault. One file at a time.
test-whole: $(VENV)/.test
	$(PYTEST) tests/end_to_end tests/faults $(PYTEST_ARGS)

# The commands of deploy/docker/Dockerfile in a fresh Debian: minutes, as root, with debootstrap.
test-image: $(VENV)/.test
	RAYDIST_IMAGE=1 $(PYTEST) tests/end_to_end/test_image.py $(PYTEST_ARGS)

# N changes of each kind of file that commands read (tests/cli/test_fuzz.py); `make test` makes a few.
N ?= 500
fuzz: $(VENV)/.test
	RAYDIST_FUZZ=$(N) $(PYTEST) tests/cli/test_fuzz.py

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.run
	$(BIN)/python docs/generate.py

# build/site/index.html; a warning, a broken link or a missing anchor is an error. Needs no network once .[docs] is installed.
site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

bench: $(VENV)/.run
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/steady.py

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
