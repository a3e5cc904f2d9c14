# Every target sets up .venv by itself; the second run finds it ready.
IS_USABLE = $(shell $(1) -c "import sys; sys.version_info >= (3, 11) and print(1)" 2>/dev/null)
CANDIDATES := python3 python3.13 python3.12 python3.11
PYTHON ?= $(firstword $(foreach python,$(CANDIDATES),$(if $(call IS_USABLE,$(python)),$(python))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The part of pyproject.toml that the installed packages follow from.
INSTALLED := $(VENV)/.project

# MLX's Linux wheel multiplies matrices slowly without a tuned BLAS; macOS has its own.
OPENBLAS := $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0))
RUN := $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS)) $(BIN)

# Without compiled files a worker takes twice as long to start.
unexport PYTHONDONTWRITEBYTECODE

# Two workers, each on whole files, so that what a file sets up is set up once; in the order of the
# folders, so that no long file is left for the end.
PYTEST := $(RUN)/python -m pytest
TWO_WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

# Random histories of `make fuzz`: how many, for how many seconds at most, and the first one's seed.
FUZZ_HISTORIES ?= 100000
FUZZ_SECONDS ?= 3000
FUZZ_SEED ?= 0

.PHONY: help install demo check test test-models fuzz bench lint format wheel clean
.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

# A change of the tools' settings in pyproject.toml installs nothing, and needs no network.
$(STAMP): pyproject.toml
	@sed '/^\[tool/,$$d' $< | cmp -s - $(INSTALLED) || $(MAKE) --no-print-directory install
	@touch $@

install: ## Set up .venv anew (the other targets do it when they must)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up $(VENV) (once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --upgrade pip
	@$(BIN)/python -m pip install -q -e ".[dev]"
	@sed '/^\[tool/,$$d' pyproject.toml > $(INSTALLED)
	@touch $(STAMP)

demo: $(STAMP) ## Generate text with SmolLM2 on this cache, and show the numbers
	@$(RUN)/mlx-kvcache generate "What is the capital of France? Answer in one sentence." --max-tokens 48

check: $(STAMP) ## The fast tests: no processes, no compilers, no long schedules (a minute or two)
	@$(PYTEST) -m "not slow and not models" $(TWO_WORKERS)

test: $(STAMP) ## The test suite without real models (some eight minutes)
	@$(PYTEST) -m "not models" $(TWO_WORKERS)

test-models: $(STAMP) ## Tests on SmolLM2 and Gemma 3 270M (downloads them once)
	@$(PYTEST) -m models

fuzz: $(STAMP) ## 100,000 random histories with interrupts (FUZZ_HISTORIES, FUZZ_SECONDS, FUZZ_SEED)
	@$(RUN)/python -m tests.fuzz --histories $(FUZZ_HISTORIES) --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

bench: $(STAMP) ## The short benchmarks, against mlx-lm's own caches
	@$(RUN)/python benchmarks/cache_steps.py
	@$(RUN)/python benchmarks/tokens_per_second.py --model smollm2 --prompt-tokens 256 --tokens 64

lint: $(STAMP) ## ruff, mypy and actionlint, as pre-commit runs them
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@if [ -x $(BIN)/actionlint ]; then $(BIN)/actionlint; else echo "actionlint: not available here"; fi

format: $(STAMP) ## Let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

wheel: $(STAMP) ## Build the wheel, and see that it works in an empty environment
	@rm -rf dist build/wheel
	@$(BIN)/python -m build --outdir dist .
	@$(PYTHON) -m venv build/wheel
	@build/wheel/bin/python -m pip install -q dist/*.whl
	@cd / && $(CURDIR)/build/wheel/bin/python -c "from mlx_kvcache.store import metal as m; \
	    print('Metal sources in the wheel:', [k.file for k in m.KERNELS if m.read_source(k.file)])"
	@cd / && $(CURDIR)/build/wheel/bin/mlx-kvcache --version

clean: ## Remove what the targets made
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
