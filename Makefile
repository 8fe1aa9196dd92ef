PYTHON ?= python3
BIN := .venv/bin
SCENARIO ?= scenarios/rcsr_mr50.yaml
# Tests that start processes often wait; two more workers than cores keep the cores busy.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
STATIC := static-style static-types static-layers static-lengths static-documents

# Without compiled modules, which some machines switch off, each process takes twice as long to start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run static $(STATIC) test check bench peers hostile chaos simulate clusters docs clean

run: .venv/installed
	$(BIN)/fedmq scenario $(SCENARIO)

# Static checks, side by side: style, types, layers and import circles, lengths, documents. Each prints in one piece,
# and one that fails does not hide what the others find.
static: .venv/installed
	@$(MAKE) --no-print-directory --keep-going --jobs $(if $(filter output-sync,$(.FEATURES)),--output-sync) $(STATIC)

static-style: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

static-types: .venv/installed
	$(BIN)/mypy

static-layers: .venv/installed
	$(BIN)/lint-imports
	$(BIN)/python -m tools.import_circles

static-lengths: .venv/installed
	$(BIN)/python -m tools.size_limits

static-documents: .venv/installed
	$(BIN)/python -m tools.document_checks

test: static
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

check: static
	$(BIN)/pytest -n auto --dist worksteal -m "not slow"

# Whole federations under random faults in one process; a seed that fails is replayed by python -m tests.simulation SEED.
SEEDS ?= 3000
simulate: .venv/installed
	FEDMQ_SEEDS=$(SEEDS) $(BIN)/pytest -n $(WORKERS) --dist worksteal tests/test_simulation.py

chaos: .venv/installed
	FEDMQ_CHAOS=200 timeout 3600 $(BIN)/pytest tests/test_federation_chaos.py

# Not part of make test: Ray is large, and its test takes two minutes.
clusters: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[ray,slurm]'
	$(BIN)/pytest tests/test_launch_remote_peer.py tests/test_launch_slurm.py tests/test_launch_ray.py

hostile: .venv/installed
	$(BIN)/python -m benchmarks.hostile

SITE ?= site
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir $(SITE)
	@echo "the site is in $(SITE)/; .venv/bin/mkdocs serve shows it on 127.0.0.1:8000, with search"

bench: .venv/installed
	$(BIN)/python -m benchmarks

# The same work in Flower's simulation, which needs other versions of some packages.
peers: .venv/installed
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check 'flwr[simulation]'
	$(BIN)/python -m benchmarks --only peers

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedmq needs Python 3.11 or newer, found " + sys.version)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch torchvision
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[embedded,report,dev]'
	touch $@

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
