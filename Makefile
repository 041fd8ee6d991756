# One command per task, each doing its own set-up, where there is nothing but Python (3.10 or newer), pip, make and git.
#
#   PYTHON  the interpreter the environment is made from                       make test PYTHON=python3.12
#   VENV    where the environment is; empty: use PYTHON as it is, install nothing          make test VENV=
#   JOBS    tests at a time; empty: one process, without pytest-xdist         make test JOBS= ARGS="--pdb"
#   ARGS    passed on to the command                                           make demo ARGS="--device host"
#   TESTS   which tests                                                        make test TESTS=tests/cudabind

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cu13,cutlass,test,gen,examples,dev
TESTS ?= tests
ARGS ?=
JOBS ?= auto
PARALLEL = $(if $(JOBS),--numprocesses $(JOBS) --dist loadgroup)

.DEFAULT_GOAL := help
.PHONY: help demo test test-cu12 test-gpu sanitize fuzz soak check format lint types generated bench gen table

ifeq ($(strip $(VENV)),)

PY := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

else

PY := $(VENV)/bin/python
READY := $(VENV)/.ready

# Touched only after everything is installed: a second call costs nothing, an interrupted one resumes.
# Debian's python3 has no ensurepip unless python3-venv is installed; virtualenv brings a pip of its own, and a --target
# install leaves the system's packages alone.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "make: Python 3.10 or newer is needed; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
	    echo "make: python -m venv failed (see above); trying virtualenv instead" >&2; \
	    $(PYTHON) -m pip install --quiet --target $(VENV)/bootstrap virtualenv && \
	    PYTHONPATH=$(VENV)/bootstrap $(PYTHON) -m virtualenv --quiet $(VENV) && rm -rf $(VENV)/bootstrap; } || { \
	    echo "make: no environment could be made: install python3-venv, or name another PYTHON" >&2; exit 1; }
	$(PY) -m pip install --editable '.[$(EXTRAS)]'
	@touch $@

endif

help:  ## list these targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(READY)  ## train on real handwritten digits, on the GPU if there is one, else on the host
	$(PY) examples/01_train_digits.py $(ARGS)

test: $(READY)  ## the tests that need no GPU
	$(PY) -m pytest $(TESTS) --ignore=tests/gpu --ignore=tests/benchmarks $(PARALLEL) $(ARGS)

# Not in the same environment: cuda-python is of one CUDA or of the other, and some wheels of the two share files. What
# is about the generator and the releases' headers is the same in both, and `make test` has run it.
CU12_TESTS := tests/cudabind --ignore=tests/cudabind/test_gen.py -k "installed or not modules"
test-cu12:  ## the tests of the bindings, against the libraries of CUDA 12 in an environment of their own
	@$(MAKE) --no-print-directory test VENV=.venv-cu12 EXTRAS=cu12,test,gen TESTS='$(CU12_TESTS)'

# Fresh random numbers each time; the first lines of the output tell the seed to repeat them with. Each process takes
# some 600 MB of the GPU: four, unless JOBS says otherwise.
test-gpu: JOBS := $(if $(filter auto,$(JOBS)),4,$(JOBS))
test-gpu: $(READY)  ## the tests that need one
	$(PY) -m pytest tests/gpu -q --seed=random -m "not alone" $(PARALLEL) $(ARGS)
	$(PY) -m pytest tests/gpu -q --seed=random -m alone $(ARGS)

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
