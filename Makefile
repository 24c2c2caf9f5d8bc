# Every verb makes the virtual environment it needs: `make demo` or `make test` in a fresh clone is
# the only command. gpu-test takes $(PYTHON) as it is, since machines with a GPU bring their torch;
# GPU_TESTS may name some of its files.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/installed
TYPING := build/typing
GPU_TESTS := tests/gpu
RECORD := tests/gpu/record.json
WORKERS := 4
.DEFAULT_GOAL := test

.PHONY: demo test lint gpu-test clean tree

demo: $(INSTALLED)
	$(VENV)/bin/python -m warploom.demo

test: lint
	$(VENV)/bin/python -m pytest -q -m "not gpu"

lint: $(INSTALLED) tree
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	MYPYPATH=$(TYPING) $(VENV)/bin/mypy -p warploom -p benchmarks

gpu-test: tree
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(TYPING):$$PYTHONPATH \
		$(PYTHON) -m pytest -q -m gpu -n $(WORKERS) --dist loadgroup --record $(RECORD) $(GPU_TESTS)

clean:
	rm -rf $(VENV) build warploom.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[nvrtc,dev]'
	touch $@

# The import package as an installed one looks, for mypy and for machines without an install, where
# PYTHONSAFEPATH keeps the root (whose warploom/ is only a part of the package) off sys.path.
tree:
	rm -rf $(TYPING)
	mkdir -p $(TYPING)/warploom
	ln -s $(CURDIR)/warploom/* $(CURDIR)/configs $(CURDIR)/generator $(CURDIR)/runtime \
		$(CURDIR)/templates $(CURDIR)/tuning $(TYPING)/warploom
