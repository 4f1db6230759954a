# `make help` lists what there is. Every target makes the virtual environment first, once: the demo
# with what it needs, all others with everything.

VENV := .venv
BIN := $(VENV)/bin
VERL := .venv-verl/bin/python
TRL := .venv-trl/bin/python
INSPECT := .venv-inspect/bin/python
FRAMEWORKS := .venv-frameworks/bin/python
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.installed-for-demo
RECENT := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$name -c '$(RECENT)' 2>/dev/null && { echo $$name; break; }; done)
CONSTRAINTS := $(wildcard constraints.txt)
# pip compiles nothing here (see below); without this, each process would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
# Empty if $(VENV) is missing, its Python is gone or too old, or it has no pip.
USABLE := $(shell $(BIN)/python -c 'import pip; $(RECENT)' 2>/dev/null && echo yes)

# Test processes at once; further arguments for pytest and for the benchmarks.
JOBS ?= 5
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test faults test-verl test-trl test-inspect test-frameworks check bench clean new-venv

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv with everything for development

demo: $(DEMO) ## Run 64 prompts x 4 rollouts on private servers, then clean up
	@$(BIN)/rollout demo $(ARGS)

test: $(INSTALLED) ## Run the test suite; a selection: make test ARGS="tests/unit -k lease"
	@$(BIN)/pytest -n $(JOBS) --dist worksteal $(ARGS)

faults: $(INSTALLED) ## Run the fault tests alone: they harm servers and processes of their own
	@$(BIN)/pytest tests/faults $(ARGS)

test-verl: ## Check our batches with verl itself, installed for CPUs into .venv-verl (1.7 GB)
	@test -x $(VERL) || $(PYTHON) -m venv .venv-verl
	@$(VERL) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(VERL) -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	@$(VERL) -m pip install --quiet --disable-pip-version-check \
		--requirement tests/with_verl/requirements.txt --editable '.[embedded]'
	@PYTHONPATH=tests $(VERL) -m pytest --confcutdir=tests/with_verl tests/with_verl $(ARGS)

test-trl: ## Train with TRL and torch on our batches, installed for CPUs into .venv-trl (1.5 GB)
	@test -x $(TRL) || $(PYTHON) -m venv .venv-trl
	@$(TRL) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(TRL) -m pip install --quiet --disable-pip-version-check \
		--requirement tests/with_trl/requirements.txt --editable '.[embedded]'
	@PYTHONPATH=tests $(TRL) -m pytest --confcutdir=tests/with_trl tests/with_trl $(ARGS)

test-inspect: ## Read our logs with Inspect, installed into .venv-inspect (430 MB)
	@test -x $(INSPECT) || $(PYTHON) -m venv .venv-inspect
	@$(INSPECT) -m pip install --quiet --disable-pip-version-check \
		--requirement tests/with_inspect/requirements.txt --editable '.[embedded]'
	@PYTHONPATH=tests $(INSPECT) -m pytest --confcutdir=tests/with_inspect tests/with_inspect $(ARGS)

test-frameworks: ## Check the gateway with agents of frameworks, installed into .venv-frameworks (700 MB)
	@test -x $(FRAMEWORKS) || $(PYTHON) -m venv .venv-frameworks
	@$(FRAMEWORKS) -m pip install --quiet --disable-pip-version-check \
		--requirement tests/with_frameworks/requirements.txt --editable .
	@$(FRAMEWORKS) -m pip install --quiet --disable-pip-version-check --no-deps strands-agents mcp mcp-types
	@PATH="$(CURDIR)/.venv-frameworks/bin:$$PATH" PYTHONPATH=tests $(FRAMEWORKS) -m pytest \
		--confcutdir=tests/with_frameworks tests/with_frameworks $(ARGS)

check: $(INSTALLED) ## Check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(INSTALLED) ## Measure this machine and print the table of goals; make bench ARGS="store"
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .venv-verl .venv-trl .venv-inspect .venv-frameworks .pytest_cache .ruff_cache .hypothesis build *.egg-info

new-venv:
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3'; exit 1; }
	@test ! -e $(VENV) || echo 'The Python of $(VENV) is missing, older than 3.11 or without pip.'
	@echo 'Making $(VENV) with $(PYTHON) ...'
	@$(PYTHON) -m venv --clear $(VENV)

$(DEMO): EXTRA := embedded
$(INSTALLED): EXTRA := dev
# Python compiles what it imports, so pip need not compile everything. Either installation serves
# the demo; `touch` says so.
$(DEMO) $(INSTALLED): pyproject.toml $(CONSTRAINTS) $(if $(USABLE),,new-venv)
	@echo 'Installing into $(VENV) ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		$(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[$(EXTRA)]'
	@touch $(DEMO) $@
