# make demo | test | bench | lint | sanitize | wheel. Each sets up .venv by itself when it is missing or out of date.
# Needs GNU make, python3 (3.10+, with venv) and g++ (12+); everything else is installed from PyPI.

PYTHON ?= python3
# The torch to use; set TORCH to another requirement, e.g. make test TORCH=torch==2.12.0
TORCH ?= torch==2.13.0
EXTRAS ?= triton,train,bench,peers,dev

# Tests of the ops that have Triton kernels, interpreted on CPU in a process of their own.
IN_TRITON := $(addprefix tests/ops/test_,affine_scan.py gae.py group_advantages.py group_advantages_sizes.py \
	long_rows.py policy_loss.py policy_loss_rules.py token_logprobs.py token_logprobs_rules.py value_loss.py whiten.py)

# Tests run in so many processes of one thread each; a file stays in one of them.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h')
# Also what only nvcc compiles, which needs no new set-up when it changes.
CPP_FILES := $(SOURCES) $(shell find csrc -name '*.cu' -o -name '*.cuh')
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test bench lint format sanitize wheel clean

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# The second line runs the CUDA kernels on the host, where races in shared memory are found: tests/cuda_on_host/README.md.
test: $(STAMP)
	$(PYTEST)
	FASTRL_CUDA_ON_HOST=checked $(PYTEST) --impl=cuda-on-host tests/ops
	TRITON_INTERPRET=1 $(PYTEST) --impl=triton $(IN_TRITON)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

# The op tests over kernels built with AddressSanitizer and UBSan, from a copy of the package of its own; then some of
# them over the CUDA kernels on the host. Leaks are not looked for (the interpreter never frees everything), and nothing
# is compiled by torch (the sanitizers do not see it).
SANITIZED := build/sanitize
SANITIZERS := LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
sanitize: $(STAMP)
	rm -rf $(SANITIZED)/lib*
	FASTRL_SANITIZE=address,undefined FASTRL_CPP=1 $(BIN)/python setup.py --quiet build --build-base $(SANITIZED)
	cd $(SANITIZED)/lib.* && $(SANITIZERS) \
	$(CURDIR)/$(BIN)/python -c 'import sys, pytest, fastrl._C as c; assert c.build_info()["sanitizer"]; sys.exit(pytest.main(sys.argv[1:]))' \
	$(CURDIR)/tests/ops -q -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -p no:cacheprovider -k "not compile and not reference-"
	$(SANITIZERS) FASTRL_CUDA_ON_HOST=address $(BIN)/python -m pytest tests/ops -q -s -p no:cacheprovider --impl=cuda-on-host \
	-k "not compile and (against_reference or strides or layouts or rule_2 or rule_5)"

# One wheel for every torch from 2.10 on; it has CUDA kernels where setup.py finds nvcc and a reason to use it, or is told to.
wheel: $(STAMP)
	rm -rf build/lib* build/bdist*
	FASTRL_CPP=1 FASTRL_WERROR=1 $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps -w dist .

$(STAMP): pyproject.toml setup.py requirements/peers-no-deps.txt $(SOURCES)
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is missing; install Python 3.10 or newer" >&2; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "make: $${CXX:-g++} is missing; install g++ or set CXX" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "make: this Python has no venv; install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	echo "$(TORCH)" > $(VENV)/constraints.txt
	$(PIP) "$(TORCH)" "setuptools>=77" packaging ninja wheel
	FASTRL_CPP=1 FASTRL_WERROR=1 $(PIP) --no-build-isolation -c $(VENV)/constraints.txt -e ".[$(EXTRAS)]"
	@sed 's/ *#.*//; /^$$/d' requirements/peers-no-deps.txt | while read -r peer; do \
	  $(PIP) --no-deps --ignore-requires-python "$$peer" \
	    || echo "make: $$peer cannot be installed on this platform; the tests that need it will be skipped by name" >&2; done
	touch $@

clean:
	rm -rf build dist $(VENV) *.egg-info fastrl/_C*.so
