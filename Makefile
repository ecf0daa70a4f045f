# make demo   set everything up, then write text with a real small Llama (generated kernels on a Hopper GPU, else the CPU reference)
# make test   set everything up, then run every test that this machine can run
# make check  lint, formatting and types
# make clean  remove the virtual environment (the kernel cache: futransformer cache clear)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

PROMPT ?= What is a matrix?

.PHONY: setup demo test check clean

setup: $(READY)

$(READY): pyproject.toml requirements.txt
	@echo "==> setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(READY)

demo: $(READY)
	@$(BIN)/futransformer demo --prompt "$(PROMPT)"

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)
