# make run    set up .venv, then show fedheal at work
# make test   set up .venv with everything the tests need, then run them all
# make check  the quick part of the tests, without the documentation
# make soak   the long trials: kills, a deployment with random faults, wrong inputs, 10,000 rounds, and tests that take long
# make lint   ruff and mypy
# make bench  the benchmarks
# make docs   the documentation as a site, into site/html
# make pictures   the documentation's pictures anew, from the runs in results/
# make audit  known vulnerabilities and licences of the locked dependencies, into docs/dependencies.md
# make dist   wheel, source distribution and SBOM, into dist/; the same bytes every time
# make dist-check   install both in empty environments and run the demo
# make results    the tables of results/ anew, from the run folders there

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Processes must collect the same tests: hashes are fixed. And keep what is compiled: else each would compile all sources anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE PYTHONHASHSEED=0 $(BIN)/python -m pytest --dist=worksteal
INSTALL := $(PIP) install --quiet --constraint constraints.txt
SOAK := soak-chaos soak-kills soak-tests soak-rounds soak-fuzz

.PHONY: run test check soak $(SOAK) lint bench docs pictures results audit dist dist-check clean

run: $(VENV)/.run
	@$(BIN)/fedheal demo

test: lint
	$(PYTEST) --numprocesses=3 -m "not soak"  # three on two cores, since some tests wait for servers

check: lint
	$(PYTEST) --numprocesses=2 -m "not slow and not soak" tests src

# Three parts at a time on two cores: the deployment mostly waits. A part's output comes when it has ended.
soak: $(VENV)/.test
	$(MAKE) --no-print-directory --jobs=3 --keep-going --output-sync=target $(SOAK)

soak-chaos:
	$(BIN)/python benchmarks/chaos.py --rounds 60 --seed 0 --out runs/chaos

soak-kills:
	$(BIN)/python benchmarks/kills.py --kills 1000 --seed 0 --out runs/kills

soak-tests:
	FEDHEAL_TEST_ALL=1 $(BIN)/python -m pytest -m soak

soak-fuzz:
	$(BIN)/python benchmarks/fuzz.py --inputs 10000 --seed 0 --out runs/fuzz

soak-rounds:
	$(BIN)/python benchmarks/soak.py --rounds 10000 --seed 0 --out runs/soak

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.run
	$(BIN)/python benchmarks/aggregate.py
	$(BIN)/python benchmarks/methods.py

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --conf-dir docs --fail-on-warning --keep-going --quiet . site/html
	@echo "site/html/index.html"

pictures: $(VENV)/.test
	$(BIN)/python tools/pictures.py

results: $(VENV)/.run
	$(BIN)/python tools/results.py table

ADVISORIES ?= build/advisory-database
audit: $(VENV)/.test | $(ADVISORIES)
	$(BIN)/python tools/audit.py $(ADVISORIES)

build/advisory-database:
	git clone --quiet --depth 1 https://github.com/pypa/advisory-database $@

dist: $(VENV)/.dist
	rm -rf dist
	$(BIN)/python -m build --outdir dist >/dev/null
	$(BIN)/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible -o dist/sbom.json constraints.txt
	@cd dist && sha256sum *

dist-check: dist
	@for file in dist/*.whl dist/*.tar.gz; do \
	  rm -rf build/check && $(PYTHON) -m venv build/check && \
	  build/check/bin/python -m pip install --quiet --constraint constraints.txt $$file && \
	  (cd build/check && bin/fedheal demo --out runs/demo) || exit 1; done

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

$(VENV)/.dist: $(VENV)/.run
	@$(INSTALL) --editable '.[dist]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "Installing what the tests need ..."
	@$(INSTALL) --editable '.[dev]'
	@touch $@
