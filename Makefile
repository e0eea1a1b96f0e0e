# `make demo` and `make test` do all the set-up themselves; a second call installs nothing.
#
#   PYTHON=python3.12     the interpreter to build the environment with (3.11 or newer)
#   TORCH=cpu             take PyTorch's CPU build (hundreds of megabytes instead of gigabytes); for machines without a GPU
#   VENV=.venv            where the environment lives
#   ARGS="steps=20"       more overrides for `make demo`
#
# `make vllm` builds the environment of engine.kind = "vllm", .peers/vllm, where Tidemill finds it: some gigabytes, some minutes.
# `make sglang` builds one of SGLang's CPU server beside it, for tests.
# `make peers` builds the environments of what the benchmarks compare with, in .peers; they take some gigabytes.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= default
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH_INDEX := $(if $(filter cpu,$(TORCH)),--index-url https://download.pytorch.org/whl/cpu,)

PEERS := .peers
PEER_PIP = $(PEERS)/$*/bin/python -m pip install --quiet --disable-pip-version-check
PEER_TORCH := torch==2.13.0
PEER_vllm := vllm$(if $(shell command -v nvidia-smi),,-cpu)==0.32.* --editable . --editable ./vllm_plugin
PEER_trl := trl==1.16.* peft==0.21.*
PEER_deepspeed := --constraint constraints.txt --editable '.[gym,deepspeed]'

.PHONY: install demo test clients test-runs test-backends test-deepspeed lint types unit format clean peers vllm sglang

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/tidemill demo $(ARGS)

test: lint types unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/basedpyright

# One process more than there are cores, because tests wait for processes of their own. In the order of their names: xdist
# would leave long files of few tests to the end.
unit test-runs: PROCESSES = $(shell $(BIN)/python -c "import os; print(min((os.cpu_count() or 1) + 1, 4))")
unit test-runs: BESIDE = --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder
unit test-runs: FAST = $(shell sed -n "s/^addopts.*-m '\(.*\)'.*/\1/p" pyproject.toml)
unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(BESIDE) -m "$(FAST) and not runs"

# Whole runs and commands in processes of their own, and what else takes many seconds.
test-runs: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(BESIDE) -m "$(FAST) and runs"

# Tests that need several trainer processes, the contract of each kind of engine, and tests of a vLLM server where `make vllm` has built its environment; an hour at most.
test-backends: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "ranks or engines or vllm" -rs

# Tests of trainer.kind = "deepspeed", whose processes run in an environment of their own; minutes.
test-deepspeed: $(VENV)/.installed-dev $(PEERS)/deepspeed/.installed
	$(BIN)/python -m pytest -m deepspeed

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tidemill needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing PyTorch and a few libraries into $(VENV): minutes the first time, and nothing after that."
	$(PIP) $(TORCH_INDEX) torch
	$(PIP) --editable '.[gym,serve]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[gym,serve,tensorboard,sandbox,dev]'
	@touch $@

vllm: $(PEERS)/vllm/.installed

# SGLang's CPU server, for `pytest -m sglang tests/engine/sglang`.
sglang: vllm
	$(PYTHON) tests/engine/sglang/build_environment.py $(PEERS)/vllm $(PEERS)/sglang

# Agents of OpenAI's, Anthropic's, LangChain's and inspect-ai's clients through the gateway, in environments of their own.
clients: $(VENV)/.installed-dev
	cd tests && ../$(BIN)/python -m clients.client_table ../$(PEERS)/clients

peers: $(PEERS)/trl/.installed $(PEERS)/vllm/.installed

$(PEERS)/%/.installed: Makefile
	$(PYTHON) -m venv $(PEERS)/$*
	$(PEER_PIP) $(TORCH_INDEX) $(PEER_TORCH)
	$(PEER_PIP) $(PEER_$*)
	$(PEERS)/$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # built for another torch
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
