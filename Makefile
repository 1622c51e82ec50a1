# make run    set up .venv, then show fedheal at work
# make test   set up .venv with everything the tests need, then run them all
# make check  the quick part of the tests
# make lint   ruff and mypy
# make bench  the benchmarks
# make docs   the documentation as a site, into site/
# make pictures   the documentation's pictures anew, from runs of this version
# make results    the tables of results/ anew, from the run folders there

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# In two processes, which must collect the same tests: hashes are fixed.
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest --numprocesses=2 --dist=worksteal
INSTALL := $(PIP) install --quiet --constraint constraints.txt

.PHONY: run test check lint bench docs pictures results clean

run: $(VENV)/.run
	@$(BIN)/fedheal demo

test: lint
	$(PYTEST)

check: lint
	$(PYTEST) -m "not slow"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.run
	$(BIN)/python benchmarks/aggregate.py
	$(BIN)/python benchmarks/methods.py

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --conf-dir docs --fail-on-warning --keep-going --quiet . site
	@echo "site/index.html"

pictures: $(VENV)/.test
	$(BIN)/python tools/pictures.py

results: $(VENV)/.run
	$(BIN)/python tools/results.py table

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "fedheal needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo missing)." >&2; \
	  echo "Install one and name it, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed: on Debian and Ubuntu, 'apt install python3-venv' brings what it needs." >&2; exit 2; }

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing fedheal into $(VENV) (once; PyTorch is large) ..."
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	@$(INSTALL) --editable '.[docs]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "Installing what the tests need ..."
	@$(INSTALL) --editable '.[dev]'
	@touch $@
