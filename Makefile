# make demo | test | bench | lint | sanitize | wheel. Each sets up .venv by itself when it is missing or out of date.
# Needs GNU make, python3 (3.10+, with venv) and g++ (12+); everything else is installed from PyPI.

PYTHON ?= python3
# The torch to use; set TORCH to another requirement, e.g. make test TORCH=torch==2.12.0
TORCH ?= torch==2.13.0
EXTRAS ?= train,bench,peers,dev

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h')
CPP_FILES := $(SOURCES)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test bench lint format sanitize wheel clean

demo: $(STAMP)
	$(BIN)/python -m examples.demo

test: $(STAMP)
	$(BIN)/python -m pytest

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

# The op tests over kernels built with AddressSanitizer and UBSan, from a copy of the package of its own. Leaks are not
# looked for (the interpreter never frees everything), and nothing is compiled by torch (the sanitizers do not see it).
SANITIZED := build/sanitize
sanitize: $(STAMP)
	rm -rf $(SANITIZED)/lib*
	FASTRL_SANITIZE=address,undefined FASTRL_CPP=1 $(BIN)/python setup.py --quiet build --build-base $(SANITIZED)
	cd $(SANITIZED)/lib.* && \
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	$(CURDIR)/$(BIN)/python -c 'import sys, pytest, fastrl._C as c; assert c.build_info()["sanitizer"]; sys.exit(pytest.main(sys.argv[1:]))' \
	$(CURDIR)/tests/ops -q -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -p no:cacheprovider -k "not compile and not reference-"

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
	$(PIP) --no-deps -r requirements/peers-no-deps.txt
	touch $@

clean:
	rm -rf build dist $(VENV) *.egg-info fastrl/_C*.so
