# What a newcomer types. Everything but the installing is done by scripts/, which come back here for it.
PYTHON ?= python3
NAME   ?= channels
ARGS   ?=

VENV   := .venv
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
# pip's steps, a line each: which package is being collected, downloaded, compiled.
SHELL       := bash
.SHELLFLAGS := -o pipefail -c
PIP_STEPS   := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input install --progress-bar off
STEPS       := { grep --line-buffered -E '^ *(Collecting|Downloading|Obtaining|Preparing editable|Building|Installing collected)|^ERROR' >&2 || true; }
# An editable install: Python files are seen as they are, so only these ask for a new one; the folders, because the install
# knows which modules there are.
BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*.h native/*.cpp native/engine/*.h native/engine/*.cpp) \
    $(sort $(dir $(wildcard src/penstock/*.py src/penstock/*/*.py src/penstock/*/*/*.py)))

.DEFAULT_GOAL := help
.PHONY: help serve demo test test-all kernels bench check docs clean

help:
	@echo "make serve    install what the server needs, and serve the model that ships; ARGS='DIRECTORY' another"
	@echo "make demo     install the library, and run examples/demo.py: the data plane alone"
	@echo "make check    formatting, lint, types"
	@echo "make test     what a change must pass before a push, within 12 minutes on 2 cores; scripts/test KIND runs one kind"
	@echo "make test-all everything, whole: also sanitizers, other architectures, wheels, every seed; before a release"
	@echo "make kernels  Triton's kernels, interpreted and compiled without a device, within 6 minutes on 2 cores; installs Triton"
	@echo "make bench    measure; NAME=channels says what, ARGS='…' how"
	@echo "make docs     build the documentation into build/docs; scripts/docs serve shows it while it is written"
	@echo "make clean    remove what was built and installed here"
	@echo "PYTHON=/path/to/python3 chooses the interpreter for $(VENV) (3.10 or newer)"

serve: $(VENV)/stamp-engine
	@exec $(VENV)/bin/penstock serve $(ARGS)

demo: $(VENV)/stamp-store
	@exec $(VENV)/bin/python examples/demo.py

test: $(VENV)/stamp-dev
	@scripts/test push $(ARGS)

test-all: $(VENV)/stamp-dev
	@scripts/test all $(ARGS)

kernels: $(VENV)/stamp-dev
	@PENSTOCK_INSTALL=1 scripts/test kernels $(ARGS)

bench:
	@scripts/bench $(NAME) $(ARGS)

check: $(VENV)/stamp-dev
	@scripts/check

docs:
	@scripts/docs

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# stamp-X: penstock[X] is installed and its core is as new as the sources.
$(VENV)/stamp-%: $(VENV)/stamp-backend $(BUILT_FROM)
	@echo "installing penstock[$*] into $(VENV) and compiling its core (the first time takes minutes)" >&2
	@$(PIP_STEPS) --no-build-isolation --constraint constraints.txt --editable '.[$*]' | $(STEPS)
	@$(VENV)/bin/python -m compileall -q src  # now: a new __pycache__ makes its folder newer than the stamp
	@touch $@

# The build backend lives in the venv too: with build isolation every install would compile everything again.
# Asked twice, because only the backend itself knows whether it also wants cmake and ninja.
$(VENV)/stamp-backend: $(VENV)/stamp-venv pyproject.toml
	@echo "installing the build backend (scikit-build-core, nanobind, cmake) into $(VENV)" >&2
	@$(VENV)/bin/python scripts/build-requires | $(PIP) install --requirement /dev/stdin
	@$(VENV)/bin/python scripts/build-requires | $(PIP) install --requirement /dev/stdin
	@touch $@

$(VENV)/stamp-venv:
	@'$(PYTHON)' -c '' || \
	    { echo "$(PYTHON) does not run: apt-get install python3, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Penstock needs Python 3.10 or newer, and $(PYTHON) is older: make PYTHON=/path/to/python3" >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make a virtual environment: apt-get install python3-venv" >&2; exit 1; }
	@'$(PYTHON)' -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || \
	    { echo "$(PYTHON) came without its C headers: apt-get install python3-dev" >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || \
	    { echo "there is no C++ compiler, and Penstock's core is compiled: apt-get install g++" >&2; exit 1; }
	@echo "creating the virtual environment $(VENV)" >&2
	@'$(PYTHON)' -m venv --clear $(VENV)
	@touch $@
