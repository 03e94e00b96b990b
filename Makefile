# Everything runs in .venv; what is done is not done again. `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions
export TOKENIZERS_PARALLELISM := false
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup demo test test-long test-serve mutants bench ablations check format

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: .venv/ready  ## virtual environment, packages, DeepSpeed's CPU extension

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --upgrade --quiet pip
	@echo "installing torch"; $(BIN)/pip install --quiet --constraint constraints.txt torch
	@echo "installing the rest"; $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	@echo "building DeepSpeed's CPU extension (1 to 3 minutes)"; rm -rf $(TORCH_EXTENSIONS_DIR)
	$(BIN)/python -c "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"
	touch $@

demo: setup  ## a real model, a drafter trained for it, both measured: about 20 minutes on 2 cores
	$(BIN)/python train/run.py +model=demo

test: setup .venv/transformers4  ## the test suite
	$(BIN)/python -m pytest

test-long: setup  ## kill -9 at random moments, and whole grids: some 8 minutes
	$(BIN)/python -m pytest tests/long

# Transformers 4.57.1 beside the environment, for the test that exports load there too.
.venv/transformers4: .venv/ready
	$(BIN)/pip install --quiet --no-deps --target $@ transformers==4.57.1 huggingface-hub==0.36.0 tokenizers==0.22.1

test-serve: setup .venv/vllm .venv/zlab  ## real engines against ours, in Pythons of their own
	$(BIN)/python -m pytest tests/serve

# z-lab's own package, also called dflash, with the Transformers that it pins: beside the environment, 132 MB.
.venv/zlab: .venv/ready
	rm -rf $@ $@.part
	$(BIN)/pip install --quiet --no-deps --target $@.part \
		dflash==0.1.0 transformers==5.15.0 huggingface-hub==1.27.0 tokenizers==0.22.2
	mv $@.part $@

# vLLM for CPUs: 2 to 5 minutes and 3.4 GB.
.venv/vllm: .venv/vllm/ready
.venv/vllm/ready: tests/serve/install_vllm.sh
	rm -rf $(@D)
	PYTHON=$(PYTHON) tests/serve/install_vllm.sh $(@D)
	touch $@

mutants: setup  ## plant one fault at a time, and see the named test fail
	$(BIN)/python tests/mutants.py

bench: setup .venv/zlab demo  ## both sides of every speed claim, and their ratio; makes the demo first
	$(BIN)/python tests/bench/decode.py
	$(BIN)/python tests/bench/step.py
	$(BIN)/python tests/bench/capture.py
	$(BIN)/python tests/bench/zlab.py

ablations: setup  ## the paper's questions on the demo's target, three short runs each: 70 minutes beside other work
	$(BIN)/python tests/bench/ablations.py

check: setup  ## format, lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: setup  ## format, and mend what lint can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
