# Two commands do everything: `make demo` and `make test`. Both set up what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
NATIVE := $(VENV)/.native
CORE := setup.py $(wildcard csrc/*.c csrc/*.h)
BUILD_CORE := setup.py --quiet build_ext --inplace

.PHONY: demo test test-gpu lint types format clean native native-sanitised fuzz

demo: $(READY) $(NATIVE)
	$(BIN)/paceline train --ranks 2 parallel.device=cpu

test: $(READY_DEV) $(NATIVE)
	$(BIN)/python -m pytest

# On a machine with a GPU, with that machine's own Python: needs paceline's dependencies and pytest, no plug-ins.
test-gpu:
	-@$(PYTHON) $(BUILD_CORE)
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -W ignore::pytest.PytestConfigWarning tests/gpu

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY_DEV)
	$(BIN)/mypy

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The native core anew, whatever has changed. Without a compiler this says what is lost, and is no error.
native: $(READY)
	$(BIN)/python $(BUILD_CORE) --force
	@touch $(NATIVE)

# The same with every mistake of memory or arithmetic an abort; csrc/README.md says how to use it.
SANITISE := -std=c11 -O1 -g -pthread -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize=address,undefined
native-sanitised: $(READY)
	@mkdir -p build/sanitised
	$(CC) $(SANITISE) -ffp-contract=off -fPIC -shared \
	  -I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') csrc/*.c \
	  -o build/sanitised/_native.abi3.so

# Damaged records and JPEGs for so many seconds, with libFuzzer where there is clang; a finding is left in build/fuzz.
SECONDS ?= 60
DECODER := $(filter-out csrc/arguments.c csrc/module%.c csrc/pool.c,$(wildcard csrc/*.c)) csrc/fuzz/check.c
FUZZERS := build/fuzz/record build/fuzz/jpeg
fuzz: $(FUZZERS)
	@for kind in record jpeg; do csrc/fuzz/run.sh $$kind $$(($(SECONDS) / 2)) || exit 1; done

$(FUZZERS): build/fuzz/%: csrc/fuzz/fuzz_%.c csrc/fuzz/driver.c $(DECODER) $(wildcard csrc/*.h csrc/fuzz/*.h)
	@mkdir -p build/fuzz
	@if command -v clang > /dev/null; then \
	  clang $(SANITISE),fuzzer -ffp-contract=off $(DECODER) $< -o $@; \
	else \
	  $(CC) $(SANITISE) -ffp-contract=off $(DECODER) $< csrc/fuzz/driver.c -o $@; \
	fi

clean:
	rm -rf $(VENV) build dist src/paceline.egg-info src/paceline/data/_native*.so
	rm -rf .pytest_cache .ruff_cache .mypy_cache

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11 (run make PYTHON=python3.12 $(MAKECMDGOALS))"; exit 2; }
	@echo "Setting up $(VENV): PyTorch and its CUDA packages, about 6 GB, a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'setuptools>=77' \
	  --editable '.[tensorboard,telemetry]'
	@touch $@

$(READY_DEV): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps HolisticTraceAnalysis==0.5.0
	@touch $@

# pip builds the native core too, when it installs the package; after a change of csrc this is quicker.
$(NATIVE): $(CORE) | $(READY)
	@$(BIN)/python $(BUILD_CORE)
	@touch $@
