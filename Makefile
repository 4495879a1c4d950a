# Everything a contributor runs. `make` alone lists it. Settings of pip (index, proxy) are taken from its own
# configuration; to install without a GPU build of torch, point pip at an index of CPU wheels (see README.md).

PYTHON ?= python3
PACKAGES := mtb_core mtb_ddp mtb_fsdp mtb_deepspeed mtb_comm plugins/mtb_checkpoint plugins/mtb_cp plugins/mtb_data plugins/mtb_dcp plugins/mtb_doctor plugins/mtb_ep plugins/mtb_evidence plugins/mtb_guards plugins/mtb_kit plugins/mtb_launcher plugins/mtb_pp plugins/mtb_profile plugins/mtb_report plugins/mtb_sinks plugins/mtb_tp
TOOLS := pytest pytest-timeout hypothesis tokenizers safetensors ruff mypy
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo parity side-by-side evidence test test-slow lint format docs bench clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(STAMP)  ## make .venv and install all packages into it, editable, with the tools

# What needs no change is not touched again: the stamp is older than any of these only when they changed.
$(STAMP): constraints.txt $(PACKAGES:%=%/pyproject.toml)
	@echo "Setting up $(VENV) (downloads torch the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; set PYTHON=python3.11 and remove $(VENV)." >&2; exit 2; }
	$(PIP) install -c constraints.txt setuptools wheel torch $(TOOLS)
	DS_BUILD_OPS=0 $(PIP) install -c constraints.txt --no-build-isolation $(PACKAGES:%=-e ./%)
	@touch $@

# Two DDP ranks learn to predict the bytes of the Python standard library's own sources.
demo: $(STAMP)  ## train a small GPT on two ranks: live progress, a table, runs/demo/result.json
	@rm -rf runs/demo data/demo
	@$(BIN)/mtb data prepare "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"/*.py \
		--output data/demo
	$(BIN)/mtb train --strategy ddp --nproc 2 --data data/demo --steps 200 \
		--seq-length 128 --d-model 128 --n-layers 2 --batch-size 8 --learning-rate 2e-3 \
		--run-dir runs/demo

parity: $(STAMP)  ## one training under every strategy: losses against those of `single`
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/parity.py

side-by-side: $(STAMP)  ## two commits compared to the bit: BASE=<commit> [HEAD=<commit>, else the working tree]
	$(BIN)/python benchmarks/side_by_side.py $(BASE) $(HEAD)

evidence: $(STAMP)  ## run the small recipes and write their report to docs/example
	@for r in plugins/mtb_report/sweep/recipes/*.toml; do OMP_NUM_THREADS=1 $(BIN)/mtb sweep $$r --size small \
		--run-dir runs/evidence/$$(basename $$r .toml) || exit $$?; done
	$(BIN)/mtb evidence manifest runs/evidence
	$(BIN)/mtb evidence audit runs/evidence
	$(BIN)/mtb report runs/evidence --title "The small recipes on two cores" --output docs/example/report.md

# One process for each package, JOBS at a time, the longest first; the output of a package comes when it is done. All
# packages are tested even if one fails. A package without tests of the kind is none that failed (pytest's 5).
JOBS ?= 2
LONGEST := tests mtb_fsdp mtb_core mtb_ddp mtb_deepspeed plugins/mtb_tp
SUITES := $(LONGEST) $(filter-out $(LONGEST),$(PACKAGES))

test: $(STAMP)  ## the fast tests of all packages, JOBS=2 packages at a time
	@$(MAKE) --no-print-directory -k -O -j$(JOBS) $(SUITES:%=suite/%) KIND="not slow"

test-slow: $(STAMP)  ## the tests that take long
	@$(MAKE) --no-print-directory -k -O -j$(JOBS) $(SUITES:%=suite/%) KIND=slow

suite/%:
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(KIND)" $(if $(filter tests,$*),$*,$*/tests) || test $$? = 5

lint: $(STAMP)  ## ruff and mypy, nothing is changed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)

format: $(STAMP)  ## let ruff lay out the code
	$(BIN)/ruff format .

docs: $(STAMP)  ## write docs/reference from the code
	$(BIN)/python docs/generate.py

bench:  ## the benchmarks, with their peers, in a venv of their own
	benchmarks/setup.sh
	.venv-bench/bin/python benchmarks/startup.py
	.venv-bench/bin/python benchmarks/trainer_overhead.py
	OMP_NUM_THREADS=1 .venv-bench/bin/python benchmarks/checkpoint_speed.py --nproc 2

clean:  ## remove the environments and caches; runs/ and data/ stay
	rm -rf $(VENV) .venv-bench .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -maxdepth 3 \( -name '*.egg-info' -o -name build -o -name dist \) -prune -exec rm -rf {} +
