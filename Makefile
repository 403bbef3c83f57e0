# `make train` is the main job, `make test` the whole test-suite; both need only Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint types bench clean

# Reinstalls only when the dependencies change; the package itself is installed in place.
.venv/installed: pyproject.toml constraints.txt
	@echo 'installing into .venv: about 2 GB, a few minutes'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: .venv/installed
	$(BIN)/knapformer train

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python scripts/bench_planner.py
	$(BIN)/python scripts/bench_step.py
	$(BIN)/python scripts/bench_attention.py
	rm -rf runs/bench
	$(BIN)/knapformer train run.dir=runs/bench
	$(BIN)/python scripts/score_digits.py runs/bench

clean:
	rm -rf .venv build *.egg-info
