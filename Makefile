# make demo    train the digits example over two processes
# make test    run all tests
# make lint    check style and format
# make types   check types
# make bench   compare with peers, side by side
# make soak    inject random faults into real runs for some minutes
# make versions    run the tests under each supported torch and Python (30 GB, hours)
# make clean   remove everything that make has made
#
# Each makes the environment it needs in .venv, once.

.DEFAULT_GOAL := help
.PHONY: help demo test lint types bench soak versions clean
.DELETE_ON_ERROR:

export OMP_NUM_THREADS := 1

BIN := .venv/bin
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11 python
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# A free port for each run, and no question to the name service about this host.
TORCHRUN := $(BIN)/torchrun --standalone --local-addr=127.0.0.1

help:
	@sed -n 's/^# make/make/p' Makefile

demo: .venv/examples.stamp
	$(TORCHRUN) --nproc_per_node=2 examples/train_digits.py

test: .venv/test.stamp
	$(BIN)/python -m pytest

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.stamp
	$(BIN)/mypy

bench: .venv/peers.stamp
	$(BIN)/python -m benchmarks all

soak: .venv/dev.stamp
	$(BIN)/python -m benchmarks.soak --rounds 60 --repeat-correct 100
	$(BIN)/python -m benchmarks.restarts --kills 20 --nproc 3

versions: .venv/versions.stamp
	$(BIN)/nox $(NOX)

clean:
	rm -rf .venv .nox build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/created.stamp:
	@for python in $(PYTHONS); do \
	    if "$$python" -c "$(NEW_ENOUGH)" 2>/dev/null; then \
	        echo "$$python -m venv .venv"; \
	        "$$python" -m venv --clear .venv && touch $@; exit; \
	    fi; \
	done; \
	echo "procpipe needs Python 3.11 or newer, and none of these is: $(PYTHONS)." >&2; \
	exit 1

.venv/%.stamp: .venv/created.stamp pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@
