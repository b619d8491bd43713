# The commands of this project. Any Python 3.10-3.13 with pip will do:  make demo PYTHON=python3.12
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
PY := $(BIN)/python

# Something of every room, in seconds: tests that need neither the real model, nor a Jupyter kernel, nor a process of their own.
FAST := tests/core tests/sim tests/sampling tests/text tests/package tests/observe tests/worker tests/attention \
	tests/models/test_registry.py tests/models/test_linear.py tests/api/test_stream.py \
	tests/spec_decode/test_ngram.py tests/spec_decode/test_config.py tests/serving/test_wire.py \
	tests/labs/test_build.py tests/labs/test_quiz.py tests/labs/test_stages.py tests/grading/test_outputs.py \
	tests/bench/test_workloads.py tests/bench/test_replay.py \
	--ignore tests/attention/test_cpu.py --ignore tests/attention/test_triton_compile.py --ignore tests/text/test_chat.py \
	--ignore tests/worker/test_on_simulated_cuda.py
TEST := -m pytest -p no:cacheprovider -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help demo test check fuzz lab build clean
help:
	@echo "make demo    set up, fetch the model (98 MB), generate text, and compare with transformers"
	@echo "make lab     set up and open JupyterLab in labs/"
	@echo "make test    every test, the same that CI runs, in two processes (JOBS=N for another number)"
	@echo "make check   format, lint, types and the fast tests, in under a minute"
	@echo "make fuzz    ten minutes of search with random examples: loads, headers, bodies, templates, notebooks"
	@echo "make build   rebuild the notebooks from solutions/*.py, executed"
	@echo "make clean   remove the virtual environment and caches of this folder"

# One stamp per set of extras; pip does nothing when all is there.
$(VENV)/.base: pyproject.toml checks/install.py
	$(PYTHON) checks/install.py --venv $(VENV)
	@touch $@
$(VENV)/.all: pyproject.toml checks/install.py
	$(PYTHON) checks/install.py --venv $(VENV) --extras all
	@touch $@ $(VENV)/.base

demo: $(VENV)/.base
	$(PY) -m minivllm fetch smollm2-135m
	$(PY) -m minivllm.bench.demo

lab: $(VENV)/.all
	$(PY) -m minivllm fetch smollm2-135m
	cd labs && ../$(PY) -m jupyterlab

test: $(VENV)/.all
	$(PY) $(TEST) tests $(PYTEST_ARGS)

check: export HYPOTHESIS_PROFILE := check
check: $(VENV)/.all
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) $(TEST) -p no:nbval $(FAST) -q -m "not slow" -x $(PYTEST_ARGS)

fuzz: $(VENV)/.all
	$(PY) -m tests.fuzz --seconds $(or $(SECONDS_OF_SEARCH),600)

build: $(VENV)/.all
	$(PY) -m checks build --execute

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
