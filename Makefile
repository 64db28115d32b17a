# SPDX-License-Identifier: Apache-2.0
# make demo: the environment, then an INT4 MoE layer from a checkpoint it writes, checked against FP64.
# make test: the environment, then the tests. PYTHON picks the interpreter (3.10 to 3.13).
# make test-vllm: an environment with vLLM (gigabytes), then the tests of the plugin inside it; no GPU needed.
PYTHON ?= python3
VENV ?= .venv
# The CPU build of torch serves CPU-only machines; on a machine with an NVIDIA driver pip's own default is the CUDA build.
TORCH ?= torch$(if $(shell command -v nvidia-smi 2>/dev/null),>=2.7,==2.13.0)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

VLLM ?= vllm==0.33.0

.PHONY: demo test test-vllm lint clean
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/write_checkpoint.py build/demo-checkpoint
	$(BIN)/chord run build/demo-checkpoint

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest

test-vllm:
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet "$(VLLM)" --editable ".[test]"
	PYTHONPATH=tests $(VENV)-vllm/bin/python -m pytest tests/vllm_plugin

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build dist src/*.egg-info
