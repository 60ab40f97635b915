# Two commands do everything: `make demo` and `make test`. Both set up what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev

.PHONY: demo test test-gpu lint types format clean

demo: $(READY)
	$(BIN)/paceline train --ranks 2 parallel.device=cpu

test: $(READY_DEV)
	$(BIN)/python -m pytest

# On a machine with a GPU, with that machine's own Python: needs paceline's dependencies and pytest, no plug-ins.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -W ignore::pytest.PytestConfigWarning tests/gpu

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY_DEV)
	$(BIN)/mypy

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11 (run make PYTHON=python3.12 $(MAKECMDGOALS))"; exit 2; }
	@echo "Setting up $(VENV): PyTorch and its CUDA packages, about 6 GB, a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[tensorboard,telemetry]'
	@touch $@

$(READY_DEV): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps HolisticTraceAnalysis==0.5.0
	@touch $@
