# Two commands do everything on a fresh machine: `make demo` and `make test`; while working, `make check` takes two minutes.
# All set up $(VENV) first if it is not there. torch is pinned and installed before anything else, so that pip takes the
# CPU build where a file of it is at hand; override with e.g. `make test TORCH=torch==2.10.0`, or leave TORCH empty in an
# environment that has one. Tests run in WORKERS processes.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.convselect-ready
CSRC := setup.py $(wildcard convselect/kernels/csrc/*)

# Tests start many processes: none should have to compile its modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo check test lint bench docs dist setup install native clean

demo: $(READY)
	$(BIN)/convselect demo

# Format, lint, types, and the tests that are quick; pyproject.toml says what the markers mean.
check: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow and not process and not compile and not sanitizer and not docs"

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) tests/interpreted

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-enable

# Source distribution and wheel, the second made from the first; both installed, with and without a compiler, and tried.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python .ci/check_dist.py

setup: $(READY)

# Fails on a broken link or anchor.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Edited C sources are only compiled; anything else installs anew.
$(READY): pyproject.toml $(CSRC)
	$(MAKE) $(if $(filter pyproject.toml,$?),install,native)
	touch $(READY)

install:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/python -m pip install --quiet "$(TORCH)")
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps timm  # its torchvision would replace torch

# The C library alone, in the environment that `make setup` made.
native:
	$(BIN)/python setup.py --quiet build_ext --inplace

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks convselect/kernels/*.so
