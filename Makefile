# A fresh Debian machine needs Python >= 3.11, make and git; everything else is installed here.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct
DB := runs/demo/labels.db

.PHONY: install model browser nodes demo label test check test-all clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cluster,demo,dev]'
	touch $@

model: install
	$(BIN)/python examples/quickstart/fetch_model.py $(MODEL)

browser:
	@command -v chromium >/dev/null || (apt-get update --quiet=2 && apt-get install --yes --quiet=2 chromium)

nodes: # network namespaces stand for machines; without `ip` their test is skipped
	@command -v ip >/dev/null || (apt-get update --quiet=2 && apt-get install --yes --quiet=2 iproute2)

demo: model
	$(BIN)/python -m rlhf.cli --version
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/quickstart/run.sh

label: install
	$(BIN)/rlhf label --db $(DB)

check: model browser
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -m 'not slow' --numprocesses 2 --dist loadfile

test: check

test-all: model browser nodes
	$(BIN)/pytest

clean:
	rm -rf $(VENV) build dist *.egg-info
