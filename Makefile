# drumline: two commands for users (serve, test), the rest for developers. Everything happens in .venv.
#
# Variables:
#   PYTHON       interpreter to make .venv with (3.11 or newer)           make serve PYTHON=python3.12
#   TORCH        what to hand to pip for torch; replaces the choice below  make serve TORCH='torch==2.11.0'
#   TORCH_INDEX  package index for torch alone (PyTorch publishes one for each build)
#   MODEL, TP, PORT, ARGS   for make serve; MODEL empty: the embedded default model
#   TESTS, PYTEST_ARGS      for make test
#   JOBS         test files at a time (2); 0: one session without helpers, as pytest itself does
# Of the environment, for make test and make chaos:
#   CHAOS_SLOWDOWN  multiplies the limits on time of tests/chaos (1), for a machine that is busy with other things
#   CHAOS_MEMORY    limit: MemoryError instead of the kernel's killer where control groups can be made
#   CHAOS_SEED      repeats the random kills of an earlier run

PYTHON ?= $(firstword $(foreach p,python3.12 python3.11 python3.13 python3,$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=
TP ?= 2
PORT ?= 8000
ARGS ?=
TESTS ?= tests
PYTEST_ARGS ?=
JOBS ?= 2
TORCH_VERSION := 2.13.0
PIP_ENV := PIP_DISABLE_PIP_VERSION_CHECK=1

.PHONY: help serve install dev test test-floor check matrix chaos soak fuzz search bench wheel clean

help:
	@echo 'make serve    set up .venv and serve the default model with two workers on port 8000'
	@echo 'make test     set up .venv and run the test suite'
	@echo 'make test-floor  model tests with the oldest supported transformers'
	@echo 'make check    ruff, mypy and the import rules'
	@echo 'make matrix   token equality, every model shape x TP x option (long)'
	@echo 'make chaos    every process killed, stopped, broken in every phase of its life (an hour)'
	@echo 'make soak     50,000 random requests with aborts, 100,000 messages between processes; all stays flat (minutes)'
	@echo 'make fuzz     2,000 requests made of the description of the server (minutes)'
	@echo 'make search   property tests with other examples than those of make test (minutes)'
	@echo 'make bench    benchmarks (see bench/README.md)'
	@echo 'make wheel    build dist/*.whl'
	@echo 'make clean    remove .venv and build products'

serve: install
	$(BIN)/drumline serve $(MODEL) --tensor-parallel-size $(TP) --port $(PORT) $(ARGS)

install: $(VENV)/.installed
dev: $(VENV)/.dev

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo 'drumline needs Python 3.11 or newer; pass PYTHON=/path/to/python'; exit 1; }
	@echo '== making $(VENV) with $(PYTHON)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first, alone: without a GPU its CPU build is a tenth of the default one.
$(VENV)/.torch: $(VENV)/.python
	@echo '== installing torch'
	@$(PIP_ENV) sh scripts/install_torch.sh '$(BIN)/python' '$(TORCH)' '$(TORCH_INDEX)' '$(TORCH_VERSION)'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo '== installing drumline'
	$(PIP_ENV) $(BIN)/python -m pip install -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo '== installing drumline and the tools of its developers'
	$(PIP_ENV) $(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@ $(VENV)/.installed

# The kernels first: on a fresh checkout each of the servers that start meanwhile would compile them too.
test: dev
	$(BIN)/python -c 'import drumline.model.kernels.ready'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TESTS) -n $(JOBS) --dist loadfile -m 'not matrix and not chaos and not bench and not soak and not fuzz' $(PYTEST_ARGS)

test-floor: dev
	sh scripts/test_floor.sh $(BIN)/python $(VENV)/floor -m 'not chaos and not bench' $(PYTEST_ARGS)

matrix: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n $(JOBS) -m 'matrix or table' --junitxml=build/matrix.xml $(PYTEST_ARGS)
	$(BIN)/python scripts/equality_table.py docs/equality.md build/matrix.xml

chaos: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/chaos $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests --ignore=tests/chaos -m chaos $(PYTEST_ARGS)

soak: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/soak tests/transport tests/executor -m soak $(PYTEST_ARGS)

fuzz: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/server/test_fuzz.py -m fuzz $(PYTEST_ARGS)

search: dev
	OMP_NUM_THREADS=1 DRUMLINE_HYPOTHESIS=search $(BIN)/python -m pytest tests -n $(JOBS) --dist loadfile -m 'hypothesis and not matrix and not fuzz' $(PYTEST_ARGS)

check: dev
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: dev
	$(BIN)/python bench/all_reduce.py
	$(BIN)/python bench/stage_messages.py
	$(BIN)/python bench/pipeline_overlap.py
	$(BIN)/python bench/transport.py $(if $(VLLM),--vllm '$(dir $(VLLM))python') $(if $(RAY),--ray '$(RAY)')
	$(BIN)/python bench/executor_rpc.py $(if $(VLLM),--vllm '$(dir $(VLLM))python')
	$(BIN)/python bench/offline_vs_transformers.py
ifdef VLLM
	$(BIN)/python bench/serve_load.py --vllm '$(VLLM)'
	$(BIN)/python bench/serve_vs_vllm.py "$$($(BIN)/python -m drumline.model.default_model | tail -n 1)" --vllm '$(VLLM)' --tp 1 3
else
	@echo 'VLLM=/path/to/bin/vllm compares with vLLM too, RAY=/path/to/bin/python with Ray (scripts/bench_peers.sh makes both)'
endif

wheel: dev
	$(PIP_ENV) $(BIN)/python -m pip wheel --no-deps -w dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
