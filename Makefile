# make demo     train the digits example over two processes
# make test     run all tests, on all cores
# make test-gpu run the tests for GPUs, on emulated ones where there are none
# make lint     check style and format
# make types    check types
# make docs     build the site of docs/ and the API reference in build/site
# make coverage run all tests, and report which lines they run
# make bench    compare with peers, side by side
# make gpu-hour test and measure on this machine's GPUs, in 8 minutes
# make fuzz     compare random cases with the plain model: make fuzz SEED=1 CASES=2000
# make models   compare torchvision's, timm's and transformers' models, cut as they are (CUDA build)
# make soak     run 100 rounds of the fault test, under real launchers
# make versions run the tests under each supported torch and Python (30 GB, hours)
# make clean    remove everything that make has made
#
# Each makes the environment it needs in .venv, once; test-gpu in .venv-cuda (5 GB).

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu lint types docs coverage bench gpu-hour fuzz models soak versions clean
.DELETE_ON_ERROR:

export OMP_NUM_THREADS := 1

BIN := .venv/bin
PYTHON := python3
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11 python
CUDA_BIN := .venv-cuda/bin
SEED ?= 0
CASES ?= 300
AT_ONCE := -n auto --dist loadfile --no-loadscope-reorder --durations=20
SEES_GPUS := import sys, pytest, pytest_timeout, torch; sys.exit(not torch.cuda.is_available())
NO_COMPILER := make test-gpu: no GPU was found, and to emulate some needs the C++ compiler g++ \
(Debian, Ubuntu: apt-get install g++)
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# A free port for each run, and no question to the name service about this host.
TORCHRUN := $(BIN)/torchrun --standalone --local-addr=127.0.0.1

help:
	@sed -n 's/^# make/make/p' Makefile

demo: .venv/examples.stamp
	$(TORCHRUN) --nproc_per_node=2 examples/train_digits.py

test: .venv/test.stamp
	$(BIN)/python -m pytest $(AT_ONCE)

# By the first Python that has pytest and a torch that sees a GPU; else GPUs are emulated.
test-gpu:
	@for python in $(GPU_PYTHON) $(BIN)/python python3; do \
	    if "$$python" -c "$(SEES_GPUS)" 2>/dev/null; then \
	        echo "$$python -m tests.on_gpus"; exec "$$python" -m tests.on_gpus; \
	    fi; \
	done; \
	command -v g++ >/dev/null || { echo "$(NO_COMPILER)" >&2; exit 1; }; \
	$(MAKE) --no-print-directory .venv-cuda/test.stamp && \
	$(CUDA_BIN)/python -m tests.on_gpus --seeds "$(SEED)"

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/lines.py
	@rm -rf build/imports && mkdir -p build/imports && \
	    cp -r procpipe examples benchmarks build/imports && cp -r launch build/imports/procpipe
	cd build/imports && PYTHONPATH=. ../../$(BIN)/lint-imports ../../.ci/imports.toml --no-logo --no-cache

types: .venv/dev.stamp
	$(BIN)/mypy

# Links and references are checked: each warning is an error, but with --quiet none is counted.
docs: .venv/docs.stamp
	cd .ci && NO_MKDOCS_2_WARNING=1 ../$(BIN)/mkdocs build -f mkdocs.yml
	@echo build/site/index.html

coverage: .venv/dev.stamp
	$(BIN)/python -m pytest $(AT_ONCE) --cov --cov-report=term:skip-covered

bench: .venv/peers.stamp
	$(BIN)/python -m benchmarks all

# With the Python that is there, since such a machine may have no network: see docs/benchmarks.md.
gpu-hour:
	$(PYTHON) -m benchmarks gpu $(GPU_HOUR)

fuzz: .venv/test.stamp
	$(BIN)/python -m tests.fuzz --seed $(SEED) --cases $(CASES)

# Their wheels need the CUDA build of torch.
models: .venv-cuda/models.stamp
	$(CUDA_BIN)/python -m tests.cutting

soak: .venv/dev.stamp
	$(BIN)/python -m tests.faults --fresh --rounds 100 --repeat-correct 100

versions: .venv/versions.stamp
	$(BIN)/nox $(NOX)

clean:
	rm -rf .venv .venv-cuda .nox build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/created.stamp .venv-cuda/created.stamp:
	@for python in $(PYTHONS); do \
	    if "$$python" -c "$(NEW_ENOUGH)" 2>/dev/null; then \
	        echo "$$python -m venv $(@D)"; \
	        "$$python" -m venv --clear $(@D) && \
	        $(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
	            -c constraints.txt pip && touch $@; exit; \
	    fi; \
	done; \
	echo "procpipe needs Python 3.11 or newer, and none of these is: $(PYTHONS)." >&2; \
	exit 1

# What is installed for a target: extras of procpipe, and groups for development.
EXTRAS_test := examples,hf
EXTRAS_dev := examples,hf
EXTRAS_examples := examples
EXTRAS_models := examples,hf
EXTRAS_peers := peers
GROUP_test := --group test
GROUP_dev := --group dev
GROUP_docs := --group docs
GROUP_models := --group test --group models
GROUP_versions := --group versions

.venv/%.stamp: .venv/created.stamp pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
	    -e '.$(if $(EXTRAS_$*),[$(EXTRAS_$*)])' $(GROUP_$*)
	@touch $@

# The CUDA build of torch, with the headers that the emulated GPU is built with.
.venv-cuda/%.stamp: .venv-cuda/created.stamp pyproject.toml constraints.txt
	grep -v '^torch==' constraints.txt >.venv-cuda/constraints.txt
	$(CUDA_BIN)/python -m pip install --disable-pip-version-check -c .venv-cuda/constraints.txt \
	    torch==2.15.0 -e '.$(if $(EXTRAS_$*),[$(EXTRAS_$*)])' $(GROUP_$*)
	@touch $@
