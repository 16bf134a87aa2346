# Everything here sets itself up in $(VENV), once; see `make help`.
JAX ?=
VENV ?= .venv$(if $(JAX),-jax$(JAX))
REFERENCE ?= .venv-reference
REFERENCE_PYTHON ?=
WORKDIR ?= runs/quickstart
ARGS ?=

BIN := $(VENV)/bin
SETUP := JAX='$(JAX)' sh launch/environment.sh '$(VENV)' constraints.txt
# Nothing of the environment that make was called in; the packages' bytecode is written at their first import.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart setup test slow parity lint types aot compiled tpu compiled-tpu reference clean

help: ## this list
	@echo 'make TARGET [ARGS=...] [JAX=0.11.2] [PYTHON=/path/to/python3.13]'
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-12s%s\n", $$1, $$2 }' Makefile

quickstart: ## set up, then watch a small model learn to add (WORKDIR=runs/quickstart; run again to go on)
	@$(SETUP) gguf
	$(BIN)/python -m sprl.main --config=configs/quickstart.py --workdir='$(WORKDIR)' $(ARGS)

setup: ## the virtual environment of the tests, without running anything
	@$(SETUP) gguf,test

test: setup ## the default test suite (ARGS='-k name' and so on go to pytest)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

slow: setup ## the tests that take minutes
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile $(ARGS)

parity: setup reference ## the comparison with transformers
	SPRL_REFERENCE_PYTHON='$(abspath $(REFERENCE))/bin/python' $(BIN)/python -m pytest tests/parity -m '' $(ARGS)

lint: ## ruff, its formatting check, shellcheck and hadolint
	@$(SETUP) gguf,test,lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run launch/*.sh tests/end_to_end/*.sh
	$(BIN)/hadolint launch/Dockerfile

types: ## pyright
	@$(SETUP) gguf,test,lint
	$(BIN)/pyright --pythonpath $(BIN)/python

aot: ## kernels and programs compiled for an H200, without one (needs ptxas): tests, and a table of what the kernels take
	@$(MAKE) --no-print-directory compiled VENV=.venv-aot$(if $(JAX),-jax$(JAX))

compiled:
	@$(SETUP) test,aot
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 tests/kernels/test_compiled.py tests/kernels/test_compiled_gpu_check.py \
	  tests/planning/test_planned_programs.py tests/parallel/test_mesh_kernels.py -m '' $(ARGS)
	$(if $(ARGS),,JAX_PLATFORMS=cpu $(BIN)/python benchmarks/kernel_resources.py)

tpu: ## an update and decode steps compiled for TPUs, without one
	@$(MAKE) --no-print-directory compiled-tpu VENV=.venv-tpu$(if $(JAX),-jax$(JAX))

compiled-tpu:
	@$(SETUP) test,tpu
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/planning/test_planned_programs.py -k tpu $(ARGS)

reference: ## the environment of the peers (PyTorch, transformers, TRL; Python 3.11)
	@PYTHON='$(REFERENCE_PYTHON)' sh launch/environment.sh '$(REFERENCE)' benchmarks/peers/requirements.txt '' 11 11

clean: ## remove the environments and caches; runs/ stays
	rm -rf .venv .venv-jax* .venv-aot* .venv-tpu* '$(REFERENCE)' build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
