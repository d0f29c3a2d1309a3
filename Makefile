# Each target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# CI's share of the cases that `make test` leaves out: a quarter, another one from commit to commit.
SHARE  ?= $(shell printf '%d' 0x0$$(git rev-parse --short=4 HEAD 2>/dev/null | cut -c1-4) | awk '{ print $$1 % 4 "/4" }')

.PHONY: demo test test-ci test-all lint types check wheel asan clean

demo: $(READY)            ## accelerate a set of real modules on this machine; writes cudal1-demo.html
	$(BIN)/cudal1 demo --out cudal1-demo.html

test: $(READY)            ## every module's tests, of large matrices a part; those that need a GPU are skipped without one
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not matrix"

test-ci: $(READY)         ## what `make test` has and a quarter of what it leaves out
	$(BIN)/python -m pytest -n 2 --dist worksteal --matrix-share $(SHARE)

test-all: $(READY)        ## all tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/style_limits.py

types: $(READY)
	$(BIN)/mypy

check: lint types test-ci     ## what CI runs

wheel: $(READY)           ## a wheel with the extension, in dist/
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

asan: $(READY)            ## the extension's CPU tests under AddressSanitizer
	PYTHON=$(abspath $(BIN)/python) tools/asan.sh

# Torch first, then the package without build isolation: the extension is compiled against the torch it will run with.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*.cpp csrc/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy ninja
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable ".[report,test]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info torch_cudal1/*.so
