# Two commands do everything: `make demo` and `make test`. Both set up what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
READY_DOCS := $(VENV)/.ready-docs
NATIVE := $(VENV)/.native
NATIVE_SOURCES := setup.py $(wildcard csrc/*.c csrc/*.h)
BUILD_NATIVE := setup.py --quiet build_ext --inplace

.PHONY: demo test test-all test-long test-gpu test-gpu-emulated lint types format docs wheel sbom lock locked clean native native-sanitised fuzz

demo: $(READY) $(NATIVE)
	$(BIN)/paceline train --ranks 2 parallel.device=cpu

# `make test` is the ring to run at each change: the core of every promise (two ranks against one, resumed against
# uninterrupted runs, checkpoints, and the numerics of several ranks), then the units. `make test-all` is the gate. It
# adds what starts programs and looks at what they leave behind. Tests run by file in two processes of one thread each,
# those of units last, so that both processes are busy until the end. What measures time or the load of the machine runs
# alone afterwards, also after a failure. Threads that spin while they wait would keep the core from the other process.
# A test that hangs where pytest's own limit cannot end it, in native code or in a fixture, ends its process with the
# stack of each thread.
UNITS := tests/unit tests/architecture tests/golden
NAMED = $(wildcard $(patsubst %,tests/$(1)/test_%.py,$(2)))
MAIN_PATHS := $(call NAMED,integration,train resume exact) $(call NAMED,faults,checkpoints) \
  $(call NAMED,numerics,allreduce checkpoints consensus evaluation many_ranks nonfinite powersgd strategies) \
  $(call NAMED,numerics,sync_batch_norm) $(call NAMED,examples,minimal_ddp)
ALONE := $(call NAMED,cluster/hosts,doctor link) $(call NAMED,faults,data doctor) $(call NAMED,numerics,timing) \
  $(call NAMED,integration,contention doctor_ranks script_ladder trace truth why)
PYTEST := $(BIN)/python -m pytest -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
IN_TWO := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder \
  --max-worker-restart 0
test: $(READY_DEV) $(NATIVE)
	@rm -rf build/tests
	@failed=0; \
	$(IN_TWO) $(MAIN_PATHS) $(UNITS) --junitxml build/tests/quick.xml || failed=1; \
	$(BIN)/python .ci/tests.py build/tests quick || failed=1; \
	exit $$failed

test-all: $(READY_DEV) $(NATIVE)
	@rm -rf build/tests
	@failed=0; \
	$(IN_TWO) tests $(ALONE:%=--ignore=%) --junitxml build/tests/pairs.xml || failed=1; \
	$(PYTEST) $(ALONE) --junitxml build/tests/alone.xml || failed=1; \
	$(BIN)/python .ci/tests.py build/tests pairs alone || failed=1; \
	exit $$failed

# What takes minutes: the commands of all pages, every preset for two steps, a run that is killed again and again, and,
# each for so many seconds, the native core against libjpeg-turbo and its pool under ThreadSanitizer. Without clang or
# libjpeg-turbo's headers (libjpeg62-turbo-dev) a test says what it lacks, and is skipped.
LONG_SECONDS ?= 180
test-long: $(READY_DEV)
	PACELINE_LONG_SECONDS=$(LONG_SECONDS) $(BIN)/python -m pytest -m long -rA tests

# On a machine with a GPU, with that machine's own Python: needs paceline's dependencies and pytest, no plug-ins.
test-gpu:
	-@$(PYTHON) $(BUILD_NATIVE)
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -W ignore::pytest.PytestConfigWarning tests/gpu

# Without a GPU: on one made of host memory (tests/emulated). Some of these are in `make test`.
test-gpu-emulated: $(READY_DEV)
	$(BIN)/python tests/emulated/run.py $(BIN)/python -m pytest -m "gpu and not silicon" tests/gpu

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY_DEV)
	$(BIN)/mypy

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site of the documents in build/site, which opens without a server. A warning, a broken link say, is an error.
docs: $(READY_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# A source distribution, and from it the wheel for this machine, in dist; a release's are made by its workflow.
wheel: $(READY_DEV)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# What is in dist, and all that it is used with: the packages of requirements.lock, with their hashes.
sbom: wheel
	$(BIN)/python .ci/sbom.py dist --out build/paceline.cdx.json

# The newest packages that fit pyproject.toml, with the hashes of all their files: of the image, of developers and CI,
# and of what makes a release.
LOCK := $(BIN)/uv pip compile --quiet --upgrade
LOCK_OPTIONS := --python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --no-annotate --output-file
IMAGE := --extra lmdb --extra remote --extra telemetry --extra tensorboard
lock: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(LOCK) pyproject.toml $(IMAGE) --python-version 3.12 $(LOCK_OPTIONS) requirements.lock > /dev/null
	$(LOCK) pyproject.toml --extra dev --python-version 3.11 $(LOCK_OPTIONS) requirements-dev.lock > /dev/null
	$(LOCK) --group release --python-version 3.12 $(LOCK_OPTIONS) requirements-release.lock > /dev/null

# The environment of requirements-dev.lock, in place of the newest packages: make locked test.
locked:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps HolisticTraceAnalysis==0.5.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(READY) $(READY_DEV) $(READY_DOCS)

# The native core anew, whatever has changed. Without a compiler this says what is lost, and is no error.
native: $(READY)
	$(BIN)/python $(BUILD_NATIVE) --force
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
	  clang $(SANITISE),fuzzer -ffp-contract=off $(DECODER) $< -lm -o $@; \
	else \
	  $(CC) $(SANITISE) -ffp-contract=off $(DECODER) $< csrc/fuzz/driver.c -lm -o $@; \
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

# The site is made from the sources without importing them, so it needs no PyTorch: only the extra `docs`.
DOCS_EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")
$(READY_DOCS): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p build
	@$(BIN)/python -c '$(DOCS_EXTRA)' > build/docs-requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement build/docs-requirements.txt
	@touch $@

# pip builds the native core too, when it installs the package; after a change of csrc this is quicker.
$(NATIVE): $(NATIVE_SOURCES) | $(READY)
	@$(BIN)/python $(BUILD_NATIVE)
	@touch $@
