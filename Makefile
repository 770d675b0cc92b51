# Two commands do everything on a fresh machine: `make demo` and `make test`; while working, `make check` takes two minutes.
# All set up $(VENV) first if it is not there. torch is pinned and installed before anything else, so that pip takes the
# CPU build where a file of it is at hand; override with e.g. `make test TORCH=torch==2.10.0`, which installs anew, or
# leave TORCH empty in an environment that has one. Several requirements go together: TORCH="torch==2.14.1 torchvision".
# What was asked for is asked for in every install, and looked at after the last. Tests run in WORKERS processes.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.convselect-ready
# Triton, for the tests of GPU kernels: what runs them, and the stamp of its environment.
TRITON := $(VENV)/triton/bin/python
TRITON_READY := $(VENV)/triton/.ready
COMPILED := $(wildcard tests/kernels/test_*triton*.py) tests/benchmarks/test_gpu_run_on_cpu.py
CSRC := setup.py $(wildcard convselect/kernels/csrc/*) convselect/eager/cached_calls.cpp

# Tests start many processes: none should have to compile its modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo check test lint bench docs dist setup again install triton native clean

demo: $(READY)
	$(BIN)/convselect demo

# Format, lint, types, and the tests that are quick; pyproject.toml says what the markers mean.
check: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow and not process and not compile and not sanitizer and not docs"

test: $(READY) $(TRITON_READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(TRITON) -m pytest -n $(WORKERS) $(COMPILED)
	TRITON_INTERPRET=1 $(TRITON) -m pytest -n $(WORKERS) tests/interpreted

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
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs/_site docs build/site

# A TORCH that is given, and is not the one that was given last, installs anew; edited C sources are only compiled.
GIVEN := $(VENV)/.convselect-torch
ifneq ($(origin TORCH),file)
ifneq ($(TORCH),$(if $(TORCH),$(shell cat $(GIVEN) 2>/dev/null)))
$(READY): again
endif
endif
$(READY): pyproject.toml $(CSRC)
	$(MAKE) $(if $(filter pyproject.toml again,$?),install,native)
	$(BIN)/convselect build || echo 'cached calls will go through Python'
	touch $(READY)

# Requirements in quotes; if none is given, what is there stays.
HAS = $(shell $(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" 2>/dev/null)
ASKED = $(foreach one,$(or $(TORCH),$(HAS)),'$(one)')

install:
	rm -f $(READY) $(GIVEN)  # what fails half-way is not what was there before
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/python -m pip install --quiet $(ASKED))
	$(BIN)/python -m pip install --quiet --editable '.[test]' $(ASKED)
	$(BIN)/python -m pip install --quiet --no-deps timm  # its torchvision would replace torch
	$(BIN)/python .ci/check_torch.py $(ASKED)
	echo '$(TORCH)' > $(GIVEN)

triton: $(READY) $(TRITON_READY)

$(TRITON_READY): tests/interpreted/requirements.txt | $(READY)
	$(BIN)/python .ci/beside.py $(VENV)/triton -r $<
	touch $@

# The C library alone, in the environment that `make setup` made.
native:
	$(BIN)/python setup.py --quiet build_ext --inplace

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks convselect/kernels/*.so
