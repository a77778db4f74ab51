# make demo: a virtual environment, the package, and three minutes of training that end in Shakespeare
# make test: the same environment with the test tools, and every check
# make test-metal: the kernels for Apple GPUs: on one where there is one, elsewhere in an emulator
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-metal clean

demo: .venv/installed
	$(BIN)/forge train --train.minutes 3

test: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

test-metal: .venv/tested
	$(BIN)/python -m pytest tests/metal

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Forge needs Python 3.11 or newer, and \
	$(PYTHON) is `$(PYTHON) --version 2>&1`; type: make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/tested: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@ .venv/installed

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
