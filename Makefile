# Everything from a fresh clone: `make demo` and `make test` install what they need into .venv first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install demo test test-slow lint clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("burnish needs Python 3.11 to 3.13; set PYTHON=") if not (3, 11) <= sys.version_info < (3, 14) else None'
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[test]'
	touch $@

# For the comparisons with transformers and peft, which the slow tests make.
.venv/parity: .venv/installed
	$(PIP) -e '.[test,parity]'
	touch $@

demo: install
	$(BIN)/burnish fetch smollm2-135m
	rm -rf runs/demo
	$(BIN)/burnish sft recipes/demo.yaml --out runs/demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -n 2

test-slow: .venv/parity
	$(BIN)/burnish fetch smollm2-135m
	$(BIN)/burnish fetch gemma3-270m
	$(BIN)/python -m pytest -q -m 'slow or parity'

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
