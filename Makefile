PYTHON ?= python3

# torch is installed first and by itself, because which build is wanted differs from machine to machine; the rest
# then finds it and leaves it alone. Options of pip may follow, for a CPU build or for one of a given CUDA:
#   make setup TORCH='torch==2.13.0 --index-url <index of CPU builds>'
TORCH ?= torch==2.13.0
EXTRAS ?= test,lint,examples,kernels,integrations,plots
PYTEST_ARGS ?=

VENV := $(CURDIR)/.venv
RUN := PATH="$(VENV)/bin:$$PATH" python
PIP := .venv/bin/python -m pip --disable-pip-version-check

# Kernels that are compiled on first use are kept between runs.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions

# Without a GPU, DeepSpeed is told so rather than left to search.
ifndef DS_ACCELERATOR
ifeq ($(wildcard /dev/nvidia[0-9]* /dev/dxg),)
export DS_ACCELERATOR := cpu
endif
endif

# A torch named on the command line is installed even where the environment is up to date.
ifeq ($(origin TORCH),command line)
.PHONY: .venv/.stamp
endif

.PHONY: help setup test test-versions lint demo mutate gpu matrix docs build clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 22

setup: .venv/.stamp ## make or repair .venv; quick when nothing has changed
	@:

.venv/.stamp: setup.cfg pyproject.toml ds_sparse/_version.py
	@echo "Setting up .venv (the first time takes some minutes) ..."
	@rm -f $@
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@$(PIP) install --quiet $(TORCH)
	@$(PIP) install --quiet --editable '.[$(EXTRAS)]'
	@.venv/bin/python -c 'import torch, deepspeed, ds_sparse.ops' >/dev/null || \
	    { echo "The packages in .venv do not work together. Remove it (rm -r .venv) and run make setup again."; exit 1; }
	@touch $@

test: setup ## run the tests with coverage; PYTEST_ARGS="tests/x.py -k name --no-cov" runs a part
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m pytest --cov --cov-fail-under=90 $(PYTEST_ARGS)

# mypy does not know that ops/ is ds_sparse.ops, so it is shown the tree as it is installed.
lint: setup ## ruff and mypy
	@.venv/bin/ruff check .
	@mkdir -p .cache/types/ds_sparse && cd .cache/types/ds_sparse && \
	    find . -xtype l -delete && ln -sfn ../../../ds_sparse/* ../../../ops .
	@cd .cache/types && $(VENV)/bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

VERSIONS ?= 0.16.9 0.17.6 0.18.9 0.19.6 0.19.8

test-versions: $(addprefix test-version-,$(VERSIONS)) ## run the core of the tests on VERSIONS of DeepSpeed

# What is in .cache/versions/ stands before .venv, whose other packages it shares.
test-version-%: setup
	@[ -d .cache/versions/$*/deepspeed ] || $(PIP) install --quiet --no-deps --no-build-isolation \
	    --target .cache/versions/$* deepspeed==$*
	@echo "DeepSpeed $*"
	@OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/.cache/versions/$* $(RUN) -m pytest -q -m core $(PYTEST_ARGS) tests/multirank

demo: setup ## train a small model on 2 nodes x 2 ranks, dense and compressed, and compare
	@$(RUN) -m examples.demo

mutate: setup ## plant bugs in the kernels and show how many the tests catch
	@OMP_NUM_THREADS=1 $(RUN) -m tests.ops.mutate

gpu: ## measure the kernels on this machine's GPU; uses .venv where there is one
	@PATH="$(VENV)/bin:$$PATH" python3 -m benchmarks.gpu_suite

matrix: setup ## try DeepSpeed's features x ZeRO stages x precisions, and compare with docs/features.md
	@OMP_NUM_THREADS=1 $(RUN) -m tests.multirank.matrix $(MATRIX_ARGS)

docs: setup ## write docs/configuration.md from the configuration's models
	@mkdir -p .cache docs
	@$(RUN) -m ds_sparse.config > .cache/configuration.md
	@mv .cache/configuration.md docs/configuration.md

build: setup ## build a wheel into dist/
	@rm -rf build
	@$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove what was built and cached; keeps .venv and runs/
	@rm -rf build dist *.egg-info .cache .coverage .coverage.* htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
