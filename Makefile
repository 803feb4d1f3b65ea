# Every target works by itself on a fresh Debian or Ubuntu: scripts/bootstrap.sh installs what is missing.

PYTHON := .venv/bin/python
WORKERS ?= 2
DEMO_OUT ?= out/demo

.PHONY: help env demo test test-long formal lint docs reference bench clean

help:
	@echo "make demo       real weights through the generated RTL, compared and summarised (under 5 minutes)"
	@echo "make test       lint, documentation and the test suite (under half an hour on two cores)"
	@echo "make test-long  the slower tests"
	@echo "make formal     bounded proofs of the cache's control and buffers, deeper than in the tests"
	@echo "make lint       ruff: rules and format"
	@echo "make docs       documentation in docs/_build/html"
	@echo "make reference  bring docs/configuration.md up to date with the code"
	@echo "make bench      array use of real layers, time of the weight search"
	@echo "make clean      remove what the other targets made, the environment included"

env:
	@scripts/bootstrap.sh

demo:
	@scripts/bootstrap.sh demo
	@$(PYTHON) -m kvant demo --out $(DEMO_OUT)

lint: env
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .

docs: env
	@$(PYTHON) -m sphinx -E -W --keep-going -q -b html docs docs/_build/html
	@echo "documentation: docs/_build/html/index.html"

reference: env
	@$(PYTHON) -m kvant.reference docs/configuration.md

test: lint docs
	@$(PYTHON) -m pytest -n $(WORKERS)

test-long: env
	@$(PYTHON) -m pytest -n $(WORKERS) -m long

formal: env
	@$(PYTHON) -m pytest -n $(WORKERS) -m "long or not long" tests/hw/kvcache -k formal

bench: env
	@$(PYTHON) bench/array_use.py
	@$(PYTHON) bench/weight_search.py --quick

clean:
	rm -rf .venv build out docs/_build sim_build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
