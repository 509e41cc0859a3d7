# Each target does its own set-up on a fresh machine.
VENV ?= .venv
PYTHON ?= python3
OUT ?= runs/study
STUDY_OPTIONS ?=
TEST_OPTIONS ?=
BIN = $(VENV)/bin

.PHONY: study test test-all lint clean

# Text to report: three arms, matched. Run it again after an interruption and it goes on.
study: $(VENV)/.installed
	$(BIN)/python -m depthroute study "$(OUT)" $(STUDY_OPTIONS)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu" $(TEST_OPTIONS)

test-all: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -n 2 $(TEST_OPTIONS)

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

$(VENV)/.installed: pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) scripts/setup.sh $(VENV)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) scripts/setup.sh $(VENV) dev
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
