# One command per task, each doing its own set-up, where there is nothing but Python (3.10 or newer), pip, make and git.
#
#   PYTHON  the interpreter the environment is made from                       make test PYTHON=python3.12
#   VENV    where the environment is; empty: use PYTHON as it is, install nothing          make test VENV=
#   JOBS    tests at a time; empty: one process, without pytest-xdist         make test JOBS= ARGS="--pdb"
#   ARGS    passed on to the command                                           make demo ARGS="--device host"
#   TESTS   which tests                                                        make test TESTS=tests/cudabind

PYTHON ?= python3
VENV ?= .venv
# What is installed, as the extras of pyproject.toml; behind it, what of it is downloaded, in MB (with Python 3.11).
EXTRAS ?= cu13,compilers-cu13,data-cu13,images-cu13,cutlass,mpi,ray,test,gen,examples,dev
SIZE := 2,930
HOST_EXTRAS := examples
HOST_SIZE := 60
CUBLAS_EXTRAS := examples,cublas-cu13
CUBLAS_SIZE := 560
TESTS ?= tests
ARGS ?=
JOBS ?= auto
# The tests start hundreds of processes: each would compile all that it imports, where that may not be written down.
unexport PYTHONDONTWRITEBYTECODE
PARALLEL = $(if $(JOBS),--numprocesses $(JOBS) --dist loadscope)
# Where several processes share the cores, the threads of NumPy and torch in each of them only wait for one another: with
# them torch's tests take more than twice the processors' time.
ALONE = $(if $(JOBS),OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1)
TEST = $(ALONE) $(PY) -m pytest $(TESTS) --ignore=tests/gpu --ignore=tests/benchmarks $(PARALLEL)

.DEFAULT_GOAL := help
.PHONY: help demo train test test-all test-numpy test-cu12 test-gpu sanitize fuzz soak check format lint types generated bench gen table

ifeq ($(strip $(VENV)),)

PY := $(PYTHON)
READY :=
READY_FOR_HOST :=
READY_FOR_GPU :=
ON_CUDA_12 :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

else

PY := $(VENV)/bin/python
# What an environment has is told by the stamps in it, each touched only after everything was installed: a second call
# costs nothing, an interrupted one resumes, and what is missing is added in place. READY has all that the others have.
READY := $(VENV)/.ready
READY_FOR_HOST := $(or $(wildcard $(READY)),$(VENV)/.ready-host)
READY_FOR_GPU := $(or $(wildcard $(READY)),$(VENV)/.ready-cublas)
# A driver of CUDA 12 has an environment of its own: see test-cu12.
ON_CUDA_12 := VENV=$(VENV)-cu12 EXTRAS=cu12,test,gen CUBLAS_EXTRAS=examples,cublas-cu12

$(READY):
	$(call install,$(EXTRAS),$(SIZE))
$(VENV)/.ready-host:
	$(call install,$(HOST_EXTRAS),$(HOST_SIZE))
$(VENV)/.ready-cublas:
	$(call install,$(CUBLAS_EXTRAS),$(CUBLAS_SIZE))
$(READY) $(VENV)/.ready-host $(VENV)/.ready-cublas: pyproject.toml

# What is installed is compiled when it is first imported: a third of pip's time, most of it for what nobody imports.
# Debian's python3 has no ensurepip unless python3-venv is installed; virtualenv brings a pip of its own, and a --target
# install leaves the system's packages alone.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
    echo "make: Python 3.10 or newer is needed; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
@echo "make: $(VENV) gets what [$(1)] of pyproject.toml names: some $(2) MB to download, less what it has or pip keeps"
@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
    echo "make: python -m venv failed (see above); trying virtualenv instead" >&2; \
    $(PYTHON) -m pip install --quiet --target $(VENV)/bootstrap virtualenv && \
    PYTHONPATH=$(VENV)/bootstrap $(PYTHON) -m virtualenv --quiet $(VENV) && rm -rf $(VENV)/bootstrap; } || { \
    echo "make: no environment could be made: install python3-venv, or name another PYTHON" >&2; exit 1; }
$(PY) -m pip install --no-compile --editable '.[$(1)]'
@touch $@
endef

endif

help:  ## list these targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# The CUDA of the driver, 12 or 13, and nothing where there is no driver or it shows no GPU.
FIND_GPU := import ctypes; n = ctypes.c_int(); at = ctypes.byref(n); cuda = ctypes.CDLL("libcuda.so.1"); \
    gpus = cuda.cuInit(0) == 0 == cuda.cuDeviceGetCount(at) and n.value; \
    print(("12", "13")[n.value >= 13000] if gpus and cuda.cuDriverGetVersion(at) == 0 else "")
CUDA = $(eval CUDA := $(shell $(PYTHON) -c '$(FIND_GPU)' 2>/dev/null))$(CUDA)

# What the demo needs is small where there is no GPU.
ON_GPU = READY_TO_TRAIN='$$(READY_FOR_GPU)' TRAIN_ON='--device cuda:0' $(if $(filter 12,$(CUDA)),$(ON_CUDA_12))
ON_HOST := READY_TO_TRAIN='$$(READY_FOR_HOST)'
demo:  ## train on real handwritten digits, on the GPU if there is one, else on the host
	@echo "make: $(if $(CUDA),a GPU and a driver of CUDA $(CUDA) were found,no GPU was found: the host computes)"
	@$(MAKE) --no-print-directory train $(if $(CUDA),$(ON_GPU),$(ON_HOST))

# Its products are small: NumPy's threads only wait for one another there, on a busy machine for twenty times as long.
train: $(READY_TO_TRAIN)
	OPENBLAS_NUM_THREADS=1 $(PY) examples/01_train_digits.py $(TRAIN_ON) $(ARGS)

# Those that are marked as long are left to test-all: pyproject.toml says which.
LONG := generator or compiles or exhaustive
test: $(READY)  ## the tests that need no GPU, in some minutes
	$(TEST) -m "not ($(LONG))" $(ARGS)

test-all: $(READY)  ## the same with what takes long: what CI runs
	$(TEST) $(ARGS)

# What depends on NumPy most, under the oldest one that pyproject.toml allows: it shadows the environment's own.
OLDEST_NUMPY := numpy~=2.0.0
NUMPY_TESTS := test_tensor test_views test_numpy_manners test_request_repr test_keys test_dlpack frameworks
test-numpy: $(READY)  ## the tests of tensors under the oldest NumPy
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(CURDIR)/$(VENV)/oldest-numpy '$(OLDEST_NUMPY)'
	PYTHONPATH=$(CURDIR)/$(VENV)/oldest-numpy$(if $(PYTHONPATH),:$(PYTHONPATH)) $(ALONE) $(PY) -m pytest -q $(PARALLEL) $(ARGS) \
	    $(foreach name,$(NUMPY_TESTS),$(wildcard tests/dispatch/$(name) tests/dispatch/$(name).py))

# Not in the same environment: cuda-python is of one CUDA or of the other, and some wheels of the two share files. What
# is about the generator and the releases' headers is the same in both, and `make test-all` has run it; how quick the
# bindings are was measured there, too.
CU12_TESTS := tests/cudabind --ignore-glob=tests/cudabind/test_gen*.py --ignore=tests/cudabind/test_bench_bindings.py -k "installed or not modules"
test-cu12:  ## the tests of the bindings, against the libraries of CUDA 12 in an environment of their own
	@$(MAKE) --no-print-directory test-all VENV=.venv-cu12 EXTRAS=cu12,test,gen TESTS='$(CU12_TESTS)'

# Fresh random numbers each time; the first lines of the output tell the seed to repeat them with. Each process takes
# some 600 MB of the GPU: four, unless JOBS says otherwise.
# 31,000 tests: five minutes on two H200 with JOBS=28. Each process has one of the GPUs, in turn.
test-gpu: JOBS := $(if $(filter auto,$(JOBS)),4,$(JOBS))
test-gpu: $(READY)  ## the tests that need one
	GPU_PER_PROCESS=1 $(ALONE) $(PY) -m pytest tests/gpu -q --seed=random -m "not (alone or several_gpus)" $(PARALLEL) $(ARGS)
	$(PY) -m pytest tests/gpu -q --seed=random -m "alone or several_gpus" $(ARGS)

# Each row with awkward extents and a batch, random trees; C in place, stream-K, memory beside outputs, groups, reductions.
SANITIZED := awkward or batch or random_tree or d_itself or stream_k or beside or varying or quantized
SANITIZER := compute-sanitizer --target-processes application-only --error-exitcode 9
sanitize: $(READY)  ## compute-sanitizer on a GPU: memcheck and racecheck of CUTLASS's tests, memcheck of sequences of calls
	$(SANITIZER) --tool memcheck --report-api-errors no $(PY) -m pytest tests/gpu/cutlass -q -k '$(SANITIZED)' $(ARGS)
	$(SANITIZER) --tool racecheck $(PY) -m pytest tests/gpu/cutlass -q -k '$(SANITIZED)' $(ARGS)
	$(SANITIZER) --tool memcheck --report-api-errors no $(PY) tests/differential.py --device cuda:0 --calls 4000
	$(SANITIZER) --tool memcheck --report-api-errors no $(PY) -m pytest tests/gpu/test_relocation_rows.py -q \
	    -k 'not cutlass and (softmax or pooling or norm_fwd or conv_fwd) and f16'

# Ten minutes each, unless ARGS says otherwise. The seeds are fixed: a run is repeated by its own line.
fuzz: $(READY)  ## long random sequences of calls on a GPU, each held bit by bit against a fresh request
	$(PY) tests/differential.py --device cuda:0 --calls 200000 --seconds 600 $(ARGS)

soak: $(READY)  ## ten minutes of requests from many threads on a GPU, with faults among them
	$(PY) tests/chaos.py --device cuda:0 --seconds 600 $(ARGS)

# Four targets rather than four lines: with `make -k check` one failure does not hide the next.
check: format lint types generated  ## format, lint, types, and the generated bindings against NVIDIA's headers

format: $(READY)
	$(PY) -m ruff format --check .

lint: $(READY)
	$(PY) -m ruff check .

types: $(READY)
	$(PY) -m mypy --strict cudabind dispatch

generated: $(READY)
	$(PY) -m cudabind.gen --check

bench: $(READY)  ## measure against torch, CuPy, nvmath-python and C, whichever are installed
	$(PY) -m dispatch bench $(ARGS)

gen: $(READY)  ## generate cudabind/sys again from the pinned headers
	$(PY) -m cudabind.gen $(ARGS)

table: $(READY)  ## print the dispatch table
	$(PY) -m dispatch table $(ARGS)
