# Every verb makes the virtual environment it needs: `make demo` or `make test` in a fresh clone is
# the only command. gpu-test takes $(PYTHON) as it is, since machines with a GPU bring their torch;
# FAMILY may name the one family whose tests are to run, GPU_TESTS some of the files, and GPU_OPTIONS
# may be `--missing`, for those that no record holds for, `--seconds 500` or `--workers 8`. What passes
# is noted beside the tests, or in the folder RECORD, laid out like tests/: `cp -r RECORD/. tests/`
# brings it back from another machine. WORKERS is the most processes that the other tests run in.
# `make quick` checks what was changed since the branch left BASE, in a minute; `make test` all.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/installed
FAMILY :=
GPU_TESTS := $(if $(FAMILY),tests/families/$(FAMILY)/gpu)
GPU_OPTIONS :=
RECORD := tests
WORKERS := 4
BASE := main
# Tests that wait most of their time, for a cluster or for what hangs: beside the others, they cost
# little.
WAITING := tests/tuning/test_fleet_ray.py tests/tuning/test_gpu_process.py
# A pip of this year reads indices in half the time of the one that comes with Python 3.11. Of 12,000
# installed files most are never imported: Python compiles those that are, once.
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := test

.PHONY: demo test quick cpu-test waiting-test lint gpu-test site clean

demo: $(INSTALLED)
	$(VENV)/bin/python -m warploom.demo

# Side by side: each alone leaves cores idle.
test: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs 3 lint waiting-test cpu-test

quick: $(INSTALLED)
	$(VENV)/bin/python tools/quick.py $(BASE)

cpu-test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -q -m "not gpu" -n auto --maxprocesses $(WORKERS) --dist loadscope \
		--no-loadscope-reorder $(WAITING:%=--ignore=%)

waiting-test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -q -m "not gpu" $(WAITING)

lint: $(INSTALLED)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy -p warploom -p benchmarks
	$(VENV)/bin/mypy examples

gpu-test:
	PYTHONPATH=$(CURDIR)/src:$(CURDIR):$$PYTHONPATH \
		$(PYTHON) tools/run_gpu_tests.py --record $(RECORD) $(GPU_OPTIONS) $(GPU_TESTS)

# mkdocs' notice about its next version is no matter of this site.
site: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

clean:
	rm -rf $(VENV) build src/warploom.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Warploom needs Python 3.11 or later, and $(PYTHON) is %d.%d: \
	name another, as in make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV): torch and the libraries of CUDA, some minutes the first time'
	$(PIP) --upgrade pip setuptools setuptools-scm
	$(PIP) --no-build-isolation -e '.[nvrtc,dev,docs]'
	touch $@
