# `make train` and `make test` set up what they need; a second call does no set-up.
#   make PYTHON=/path/to/python3.12 setup     another interpreter
#   make train RECIPE=bert_tiny ARGS="steps=50"

PYTHON ?= python3
RECIPE ?= gpt_tiny
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/setup.done

.PHONY: help setup train test verify lint bench demo clean

help:
	@echo "make setup    virtual environment in $(VENV), pinned dependencies, the alpa solver"
	@echo "make train    train $(RECIPE) under a plan the compiler chose"
	@echo "make test     the tests"
	@echo "make verify   the whole matrix of plans against one device (hours, resumable)"
	@echo "make lint     ruff, mypy, import contracts"
	@echo "make demo     six jobs under the cluster service, on two virtual device types"
	@echo "make bench    every benchmark"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: arena_jax needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)" >&2; \
	  echo "  hint: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "error: '$(PYTHON) -m venv' failed" >&2; \
	  echo "  hint: Debian and Ubuntu keep it in a package: apt install python3-venv" >&2; exit 2; }
	@echo "installing the pinned dependencies into $(VENV); the first time takes some minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip check --disable-pip-version-check
	@$(BIN)/python -m arena_jax.solver_setup || \
	  echo "warning: going on without the alpa solver; the default engine (highs) does not need it" >&2
	@touch $(STAMP)

train: setup
	$(BIN)/arena-jax train $(RECIPE) $(ARGS)

test: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

verify: setup
	$(BIN)/python -m tests.verify $(ARGS)
	$(BIN)/python -m tests.kill
	$(BIN)/python -m tests.swap_verify
	$(BIN)/python -m tests.service.chaos
	$(BIN)/python -m tests.kill_group
	ARENA_JAX_LONG=1 $(BIN)/python -m pytest -q -rs tests/test_gpu_profile.py tests/service/test_end_to_end.py \
	  tests/service/test_ray_cluster.py
	@if $(BIN)/python -c 'import ray' 2>/dev/null; then \
	  $(BIN)/python -m tests.service.chaos_ray 60 && $(BIN)/python -m tests.service.chaos_ray 10 0 head; \
	else echo "without chaos on Ray: it needs the extra [ray]"; fi

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	@set -e; for script in benchmarks/[!_]*.py; do echo "== $$script"; \
	  $(BIN)/python -m benchmarks.$$(basename $$script .py) $(ARGS); done

demo: setup
	$(BIN)/python -m benchmarks.service_demo $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
