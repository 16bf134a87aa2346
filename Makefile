# Each target makes its own virtual environment first (launch/environment.sh). `make help` lists the targets.
JAX ?=
PYTHON ?=
VENV ?= .venv$(if $(JAX),-jax$(JAX))
REFERENCE ?= .venv-reference
AGENTS ?= .venv-agents
AUDIT ?= .venv-audit
WORKDIR ?= runs/quickstart
EXTRAS ?=
MINUTES ?= 5
ARGS ?=

BIN := '$(VENV)/bin'
ENVIRONMENT := $(if $(PYTHON),UV_PYTHON='$(PYTHON)') sh launch/environment.sh
INSTALL := $(ENVIRONMENT) '$(VENV)' $(if $(JAX),--group jax-$(JAX))
TESTED := --group test --extra mlflow --extra ray --extra reasoning --extra serve --extra wandb
# Files keep their order: xdist would start those of few tests last, and some of these take longest. A worker that crashes ends the
# run: xdist 3.8 would replace it, and then wait for ever for the tests of its file.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# XLA cannot read programs for absent devices back from the compilation cache.
COMPILE_ONLY := JAX_PLATFORMS=cpu JAX_ENABLE_COMPILATION_CACHE=false
# The caller's Python settings do not apply. Packages keep the bytecode of their first import.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart install setup test slow soak fuzz coverage parity agents agents-venv lint types audit docs aot aot-venv tpu tpu-venv reference clean

help: ## list the targets
	@echo 'make TARGET [ARGS=...] [JAX=0.11.2] [PYTHON=3.13 or a path]'
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-12s%s\n", $$1, $$2 }' Makefile

quickstart: ## train a small model to add, on a CPU (WORKDIR=runs/quickstart; the same command resumes)
	@$(INSTALL)
	$(BIN)/python -m sprl.main --config=configs/quickstart.py --workdir='$(WORKDIR)' $(ARGS)

install: ## install sprl for its users (EXTRAS='cuda reasoning'; docs/install.md lists the extras)
	@$(INSTALL) $(foreach extra,$(EXTRAS),--extra $(extra))

setup: ## install the environment of the tests
	@$(INSTALL) $(TESTED)

test: setup ## run the default tests (ARGS='-k name' passes options to pytest)
	$(PYTEST) $(ARGS)

slow: setup ## run the tests that take minutes
	$(PYTEST) -m slow $(ARGS)

soak: setup ## kill runs at random moments for MINUTES=5, and check that nothing is lost
	$(BIN)/python tests/soak kills --minutes $(MINUTES) $(ARGS)

fuzz: setup ## give random inputs to the parts that read the input of others (ARGS='settings --minutes 5 --seed 1')
	$(BIN)/python tests/fuzz $(ARGS)

coverage: setup ## measure the lines and branches of sprl/ that the default tests run (ARGS="-m ''" adds the slow tests)
	$(PYTEST) --cov --cov-report=term:skip-covered $(ARGS)

parity: setup reference ## compare with transformers and PEFT
	SPRL_REFERENCE_PYTHON='$(abspath $(REFERENCE))/bin/python' $(BIN)/python -m pytest tests/parity -m '' $(ARGS)

agents: setup agents-venv ## test agents and the endpoint, with verifiers, under load
	SPRL_AGENTS_PYTHON='$(abspath $(AGENTS))/bin/python' $(BIN)/python -m pytest tests/agents -m '' $(ARGS)

agents-venv:
	@$(ENVIRONMENT) '$(AGENTS)' --requirements benchmarks/peers/agents-requirements.txt

lint: ## check code style, shell scripts and the Dockerfile
	@$(INSTALL) $(TESTED) --group lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run launch/*.sh tests/end_to_end/*.sh
	$(BIN)/hadolint launch/Dockerfile

types: ## check types with pyright
	@$(INSTALL) $(TESTED) --group lint
	$(BIN)/pyright --pythonpath $(BIN)/python

audit: ## list the licences of the dependencies and look for known vulnerabilities (.ci/audit.py has the rules)
	@$(INSTALL) $(TESTED) --group lint --group docs
	@$(ENVIRONMENT) '$(AUDIT)' --only-group audit
	$(BIN)/python .ci/audit.py '$(AUDIT)/bin/pip-audit'

docs: ## build the documentation into site/
	@$(INSTALL) --group docs
	$(BIN)/python docs/gen_reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

aot: ## compile kernels and programs for an H200 without one (needs ptxas; ARGS="-m ''" adds the slow tests)
	@$(MAKE) --no-print-directory aot-venv VENV=.venv-aot$(if $(JAX),-jax$(JAX))

aot-venv:
	@$(INSTALL) $(TESTED) --extra aot
	$(COMPILE_ONLY) $(PYTEST) --dist load tests/kernels/test_compiled.py tests/kernels/test_compiled_gpu_check.py \
	  tests/planning/test_gpu_static.py tests/planning/test_planned_programs.py tests/sharding/test_mesh_kernels.py $(ARGS)

tpu: ## compile an update and decode steps for TPUs without one
	@$(MAKE) --no-print-directory tpu-venv VENV=.venv-tpu$(if $(JAX),-jax$(JAX))

tpu-venv:
	@$(INSTALL) $(TESTED) --extra tpu
	$(COMPILE_ONLY) $(BIN)/python -m pytest tests/planning/test_planned_programs.py -k tpu $(ARGS)

reference: ## install the reference environment (PyTorch, transformers, PEFT and TRL on Python 3.11)
	@$(ENVIRONMENT) '$(REFERENCE)' --requirements benchmarks/peers/requirements.txt

clean: ## remove environments and caches, keep runs/
	rm -rf .uv .venv .venv-jax* .venv-aot* .venv-tpu* '$(REFERENCE)' '$(AGENTS)' '$(AUDIT)' site build *.egg-info
	rm -rf .cache .pytest_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
