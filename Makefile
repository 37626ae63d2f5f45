# make quickstart: a trained model in a few minutes. make test: all tests. make lint: style and types.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: install quickstart tools compiled test test-whole test-image fuzz soak lint format docs site bench echarts clean

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

# Once for all processes of the tests, of which some hundred are no forks. Where PYTHONDONTWRITEBYTECODE is set, as in many containers,
# each would compile what it imports: 0.2 to 0.3 s of processor time.
compiled: $(VENV)/.test
	@$(BIN)/python -m compileall -q -j 0 raydist tests

# All tests: two files that compute at a time, and one that mostly waits (tests/scheduling.py). With PYTEST_ARGS, such as "-k name -x" or "--lf", no tools are installed.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(if $(CI),--durations=25)
test: $(VENV)/.test $(if $(PYTEST_ARGS),,tools compiled)
	$(PYTEST) -n 3 tests $(PYTEST_ARGS)

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

# Twice 20 minutes of training with a fault a minute: memory, descriptors and threads of the processes stay flat (benchmarks/soak.py).
SOAK ?= --minutes 20 --runs 2
soak: $(VENV)/.test
	$(BIN)/python benchmarks/soak.py $(SOAK)

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

# Builds the charts' library again, of the versions that are named here: needs npm. Its hash is in docs/adr/0022-live-pages.md.
VENDOR := $(CURDIR)/raydist/report/html/vendor
echarts:
	folder=$$(mktemp -d) && cd $$folder && npm install --silent --no-audit --no-fund echarts@6.1.0 esbuild@0.28.2 && \
	cp $(VENDOR)/entry.js . && ./node_modules/.bin/esbuild entry.js --bundle --minify --format=iife --global-name=echarts \
	  --target=es2022 --legal-comments=inline --log-level=warning --outfile=$(VENDOR)/echarts.min.js && rm -rf $$folder

bench: $(VENV)/.run
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/steady.py

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
