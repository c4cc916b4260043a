# Every target sets itself up: the first run on a fresh clone takes minutes, later ones start at once.
# PYTHON names the interpreter that makes .venv; ARGS goes to the program (make serve ARGS="MODEL --port 9000").

PYTHON ?= python3
ARGS ?=
VENV := .venv/bin
CODE := src tests scripts $(wildcard benchmarks training)

.PHONY: help run-env dev-env serve test slow lint fmt native-check sanitize pico nano lock clean

help:
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

run-env:
	@$(PYTHON) scripts/setup.py run

dev-env:
	@$(PYTHON) scripts/setup.py dev

serve: run-env ## the server on the bundled model
	@exec $(VENV)/perilune serve $(ARGS)

test: dev-env ## the fast tests
	$(VENV)/python -m pytest $(ARGS)

slow: dev-env ## the slow tests
	$(VENV)/python -m pytest -m slow $(ARGS)

lint: dev-env native-check ## formatting, lint, types, C++ warnings
	$(VENV)/ruff format --check $(CODE)
	$(VENV)/ruff check $(CODE)
	$(VENV)/mypy $(CODE)

fmt: dev-env ## format and fix what can be fixed
	$(VENV)/ruff format $(CODE)
	$(VENV)/ruff check --fix $(CODE)
	$(VENV)/clang-format -i $$(find src/perilune/native -name '*.cc' -o -name '*.h')

native-check: dev-env
	@scripts/native.sh check

sanitize: dev-env ## the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/native.sh sanitize

pico: dev-env ## the bundled model anew: trained (ten minutes), measured, its card written
	$(VENV)/python -m training.train --config pico
	$(VENV)/python -m training.report --config pico

nano: dev-env ## the bundled nano anew: trained (hours; stopped, the same command goes on), measured, its card written
	$(VENV)/python -m training.train --config nano
	$(VENV)/python -m training.report --config nano

lock: dev-env ## requirements/*.lock anew (ARGS=--upgrade for newer versions)
	scripts/lock.sh $(ARGS)

clean: ## what was built and cached; .venv stays
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f .venv/perilune-*.stamp
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
