# `make demo` and `make test` run on a fresh machine and set it up first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help demo cluster check quick-tests tests all-tests test test-all twins lint style types setup newest transformers4 megatron next docs engine gpu-rehearsal peer-tests pins clean

RANKS ?= 4
UV := uv==0.13.8
BIN := .venv/bin
STAMP := .venv/.installed
COMPILED := torch megatron numpy sympy
# Hundreds of processes import torch and Megatron, so Python keeps compiled files, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

help:
	@echo "make demo   train on real text over $(RANKS) ranks and draw the run in runs/demo/ (6 to 8 minutes)"
	@echo "make cluster  (root, Linux) HDP and static context parallelism on an emulated cluster (5 minutes)"
	@echo "make check  before each commit: lint, types, and the quick tests that start no processes (3 minutes)"
	@echo "make test   lint, types, all tests except the slowest"
	@echo "make test-all  everything: make test, all twins, and all comparisons with the reference model"
	@echo "make twins  train a scaled-down twin of each recipe for 5 steps and print the losses (2 minutes)"
	@echo "make gpu-rehearsal  train each feature on ghost GPUs: torch's CUDA wheel on the CPU (needs a C compiler)"
	@echo "make peer-tests MEGATRON=PATH  Megatron's own unit tests on ghost GPUs, with and without our patch rows"
	@echo "make megatron VERSION=0.19.0  the main tests with another release of Megatron"
	@echo "make next MEGATRON=PATH  the main tests with a source tree of Megatron"
	@echo "make docs   build the documentation as a site in site/"
	@echo "make setup  create .venv with pinned dependencies"

setup: $(STAMP)

# The first interpreter that runs and is new enough for megatron-core 0.19.2.
$(STAMP): requirements.txt pyproject.toml setup.py
	@for candidate in python3.12 python3.13 python3; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$${python:-}" ]; then \
	  echo "error: megatron-core 0.19.2 needs Python 3.12 or newer, and none was found." >&2; \
	  echo "       Install it (Debian, Ubuntu: apt-get install python3.12 python3.12-venv; others: pyenv install 3.12)." >&2; \
	  exit 1; \
	fi; \
	echo "setting up .venv with $$($$python --version)"; \
	$$python -m venv --clear .venv; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(UV); \
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.txt; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@# Processes that start at the same time would each compile what all of them import.
	@cd .venv/lib/python3*/site-packages && ../../../bin/python -W ignore -m compileall -qq -j 0 $(COMPILED)
	@mkdir -p runs # the commands of the docs write there
	@touch $@

demo: $(STAMP)
	@$(BIN)/python scripts/demo.py --ranks $(RANKS)

# Two nodes of four ranks with links between them. A second call prints the results of the first.
cluster: $(STAMP)
	@mkdir -p runs/cluster-demo
	@$(BIN)/python -W ignore scripts/bench/cluster/speed.py --cases "byted 2x4 matched" --arms ours static \
	  --results runs/cluster-demo/results.json --plot runs/cluster-demo/timelines.png

# One worker per core, with whole files, in the order of tests/conftest.py, and one thread per process.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test test-all check tests all-tests quick-tests twins: export OMP_NUM_THREADS := 1

# mypy runs at the same time as the tests, because tests that wait leave a core free.
test: $(STAMP) style
	@$(MAKE) --no-print-directory --jobs 2 types tests

test-all: $(STAMP) style
	@$(MAKE) --no-print-directory --jobs 2 types all-tests

check: $(STAMP) style
	@$(MAKE) --no-print-directory --jobs 2 types quick-tests

tests: $(STAMP)
	$(PYTEST)

all-tests: .venv/engine
	$(PYTEST) -m ""

quick-tests: $(STAMP)
	$(PYTEST) -m "not ranks and not slow and not twins and not full"

twins: $(STAMP)
	$(BIN)/python -m pytest -q -m "twins or ranks" -k small_twin -rP tests/scripts/test_models.py | grep -E "^(twin of|FAILED|ERROR|E  )"

# With the Python of TransformerEngine, whose compiled functions tests/ghost/engine.py plays.
ENGINE_PACKAGES := transformer_engine==2.20.2 onnxscript==0.7.2 onnx==1.23.2 onnx_ir==1.1.0 ml_dtypes==0.6.0 einops==0.8.2
engine: .venv/engine
.venv/engine: $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $@ $(ENGINE_PACKAGES)
	@touch $@

# What runs on GPUs, on a machine without one (tests/ghost). `make test` runs a part of it.
ON_GHOSTS := $(addprefix tests/e2e/,hdp slices states experts activation) \
  $(patsubst %,tests/e2e/runs/test_%.py,agreement data_flags logging new_feature resume saved_pairs stock)
gpu-rehearsal: .venv/engine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "" -rs tests/ghost
	BYTESCALE_TESTS_ON=ghosts OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m ranks -rs $(ON_GHOSTS)

# Not a part of `make test`: unit tests of the source tree in $(MEGATRON), at the release that is installed here, with the
# packages that they import. They run for PEER_MINUTES; a second call continues.
PEER_MINUTES ?= 60
PEER_PACKAGES := mock==5.2.0 pytest-mock==3.17.0 nltk==3.10.4 omegaconf==2.4.0 einops==0.8.2 antlr4-python3-runtime==4.9.3
peer-tests: $(STAMP)
	test -d "$(MEGATRON)/tests/unit_tests"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target .venv-peers $(PEER_PACKAGES)
	PYTHONPATH="$(CURDIR)/.venv-peers" OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.ghost.peer_tests "$(MEGATRON)" --minutes $(PEER_MINUTES)

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck scripts/*.sh scripts/*/*.sh scripts/recipes/models/*/*.sh scripts/*.sbatch .ci/run

types: $(STAMP)
	$(BIN)/mypy

# Not a part of `make test`: tests with the newest torch, which pyproject.toml caps, in .venv-newest.
newest:
	$(MAKE) setup
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-newest
	$(BIN)/uv pip install --quiet --python .venv-newest/bin/python --upgrade -r <(sed 's/==2\..*//; /^#/d' requirements.in)
	$(BIN)/uv pip install --quiet --python .venv-newest/bin/python --no-deps --editable .
	.venv-newest/bin/bytescale --version
	.venv-newest/bin/python -m pytest -x tests/e2e/hdp/test_oracle.py tests/e2e/runs/test_resume.py tests/attention

# Not a part of `make test`: conversion with the oldest series of transformers that is supported, in .venv-transformers4.
# Models that one version writes are read by the other.
transformers4: $(STAMP)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-transformers4
	$(BIN)/uv pip install --quiet --python .venv-transformers4/bin/python "transformers==4.57.6" \
	  -r <(grep -vE '^(transformers|tokenizers|huggingface-hub|typer|hf-xet|datatrove)==' requirements.txt)
	$(BIN)/uv pip install --quiet --python .venv-transformers4/bin/python --no-deps --editable .
	$(BIN)/python -m tests.bytescale.convert.exchange write .venv-transformers4/exchange/5
	.venv-transformers4/bin/python -m tests.bytescale.convert.exchange read .venv-transformers4/exchange/5
	.venv-transformers4/bin/python -m tests.bytescale.convert.exchange write .venv-transformers4/exchange/4
	$(BIN)/python -m tests.bytescale.convert.exchange read .venv-transformers4/exchange/4
	OMP_NUM_THREADS=1 .venv-transformers4/bin/python -m pytest -n 0 -m "" tests/bytescale/convert -k "not training_begins"

# Oracles, pipelines, resumption, checkpoints of stock Megatron, and the patch table.
MEGATRON_TESTS := tests/e2e/hdp/test_oracle.py tests/e2e/hdp/test_pipelines.py tests/e2e/hdp/test_moe.py \
  tests/e2e/slices/test_seq1f1b.py tests/e2e/states/test_paged.py tests/e2e/runs/test_resume.py \
  tests/e2e/runs/test_stock.py tests/bytescale/test_patches.py tests/survey/test_survey.py

# Not a part of `make test`: these tests with another release of Megatron, in an environment of its own.
megatron:
	$(MAKE) setup
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-megatron
	$(BIN)/uv pip install --quiet --python .venv-megatron/bin/python -r <(sed 's/^megatron-core==.*/megatron-core==$(VERSION)/' requirements.txt)
	$(BIN)/uv pip install --quiet --python .venv-megatron/bin/python --no-deps --editable .
	OMP_NUM_THREADS=1 .venv-megatron/bin/python -m pytest -n 2 --dist loadfile $(MEGATRON_TESTS)

# Not a part of `make test`: these tests with the source tree of Megatron in $(MEGATRON), which builds its own helpers.
next:
	test -f "$(MEGATRON)/megatron/core/package_info.py"
	$(MAKE) setup
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-megatron
	$(BIN)/uv pip install --quiet --python .venv-megatron/bin/python pybind11 setuptools -r <(grep -v '^megatron-core==' requirements.txt)
	$(BIN)/uv pip install --quiet --python .venv-megatron/bin/python --no-deps --editable .
	PATH="$(CURDIR)/.venv-megatron/bin:$$PATH" $(MAKE) -C "$(MEGATRON)/megatron/core/datasets" \
	  LIBEXT="$$(.venv-megatron/bin/python -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")"
	PYTHONPATH="$(MEGATRON)" OMP_NUM_THREADS=1 .venv-megatron/bin/python -m pytest -n 2 --dist loadfile $(MEGATRON_TESTS)

# Uses no network; a broken link or a page that mkdocs.yml lacks is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pins: $(STAMP)
	$(BIN)/uv pip compile --quiet --no-header --no-annotate --python $(BIN)/python requirements.in -o requirements.txt

clean:
	rm -rf .venv .venv-newest .venv-transformers4 .venv-megatron .venv-peers runs data build site ./*.egg-info
