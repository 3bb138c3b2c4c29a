# Every target sets up what it needs: a virtual environment in .venv with Baton and its tools.
# Set-up runs again when pyproject.toml changes, when this folder has moved, and when the
# environment no longer works; `make clean` forces it. PYTHON=... chooses the interpreter.

ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
  $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
endif

BIN := .venv/bin
READY := .venv/ready
RUN := $(BIN)/python -m

# What a working environment answers; anything else makes it afresh. The path is part of the answer
# since the scripts in .venv/bin name it.
EXPECTED := baton-router $(CURDIR)
ANSWER := $(shell $(BIN)/python -c 'import importlib.metadata as m, pip, pytest, trio; print(m.metadata("baton-router")["Name"], open("$(READY)").read().strip())' 2>/dev/null)
ifneq ($(ANSWER),$(EXPECTED))
STALE := stale
endif

.PHONY: help setup demo test lint format types check diagrams bench conform real clean stale

help:
	@echo 'make demo      a worker dies, a client leaves, a prefill fails (half a minute)'
	@echo 'make test      all tests'
	@echo 'make lint      style of the code          make format    put it right'
	@echo 'make types     mypy --strict'
	@echo 'make check     model-check the state machines; generated files are fresh'
	@echo 'make diagrams  write the generated files'
	@echo 'make bench     Baton beside other routers, one core each (minutes; a C compiler; PyPI)'
	@echo 'make conform   what users complain about, tried on Baton and other routers (minutes; PyPI)'
	@echo 'make real      against real vLLM and SGLang on the CPU (see docs/testing.md)'

setup: $(READY)

$(READY): pyproject.toml $(STALE)
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or later with venv is needed'; exit 1; }
	$(if $(STALE),rm -rf .venv)
	$(if $(STALE),$(PYTHON) -m venv .venv)
	$(RUN) pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(RUN) pip install --quiet --disable-pip-version-check --editable . --group dev
	@echo '$(CURDIR)' > $(READY)

# make demo ARGS=--nats: workers on NATS, all drained under load.
demo: $(READY)
	$(BIN)/baton demo $(ARGS)

test: $(READY)
	$(RUN) pytest --numprocesses auto --maxprocesses 8 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(READY)
	$(RUN) mypy --strict

check: $(READY)
	$(BIN)/baton diagrams --check
	$(BIN)/baton check

diagrams: $(READY)
	$(BIN)/baton diagrams

# Options go in ARGS: make bench ARGS='--only unary --rounds 1'
bench: $(READY)
	$(RUN) benchmarks $(ARGS)

# The matrix of docs/conformance.md. Other routers fail cases; here that is no error.
conform: $(READY)
	$(BIN)/python -c 'from benchmarks.candidates import CANDIDATES, install; [install(each) for each in CANDIDATES]'
	$(BIN)/baton conform baton vllm-router sglang-router smg --bin .venv-bench/bin --markdown $(ARGS); test $$? -le 1

real: $(READY)
	$(RUN) pip install --quiet --disable-pip-version-check --group real
	$(RUN) tests.real.install
	$(RUN) pytest -m real tests/real $(ARGS)

clean:
	rm -rf .venv .venv-bench build
