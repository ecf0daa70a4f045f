# make demo      set everything up, then write text with a real small Llama (generated kernels on a Hopper GPU, else the CPU reference)
# make test      set everything up, then run every test that this machine can run
# make check     lint, formatting and types
# make coverage  which lines the tests run that need neither a GPU nor a compiler
# make docs      the pages as a site, in site/
# make sanitize  compute-sanitizer over every kernel, on a Hopper GPU
# make clean     remove the virtual environment (the kernel cache: futransformer cache clear)
#
# make demo PROMPT='Why is the sky blue?' answers another question; make PYTHON=python3.12 ... takes another Python.

SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check

export PROMPT

# Of what pip says: the large downloads, the last step, and errors. It has the pipe's status, so a failure still fails.
SHORTER := sed -un -e '/[0-9][0-9.]* [MG]B)/p' -e '/^Installing/s/:.*/ (this takes a minute or two)/p' -e '/^ERROR/p'

.PHONY: setup demo test coverage check docs sanitize clean

setup: $(READY)

$(READY): pyproject.toml requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "==> setting up $(VENV): a few minutes the first time, some GB of downloads"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --progress-bar off -r requirements.txt 2>&1 | $(SHORTER)
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable . 2>&1 | $(SHORTER)
	@touch $(READY)

demo: $(READY)
	@$(BIN)/futransformer demo $${PROMPT:+--prompt "$$PROMPT"}

test: $(READY)
	$(BIN)/python -m pytest

coverage: $(READY)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not gpu and not compile"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort=cover --skip-covered

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Writes the generated pages anew; fails where a link leads nowhere, or a page is outside the navigation.
docs: $(READY)
	$(BIN)/python -m docs.catalogue
	$(BIN)/python -m docs.api
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "==> site/index.html"

SANITIZED := .sanitize

sanitize: $(READY)
	$(BIN)/python -m tests.ops.models $(SANITIZED)/kernels tails copies layers smollm2-135m smollm2-135m-fp8 smollm2-135m-int4-g32-asym \
		smollm2-135m-kv4 smollm2-135m-int4-g32-asym-kv4 smollm2-135m-bf16-fp8-head8 odd odd-fp8 group16 group5 \
		narrow-head narrow-head-fp8 narrow-head-int4 narrow-head-int4-channel-asym narrow-head-int4-head4 \
		narrow-head-bf16-fp8-head8 narrow-head-fp8-int4-kv8-kv4-min
	$(BIN)/python -m tests.sanitize.planted $(SANITIZED)/kernels
	$(BIN)/python -m tests.sanitize --kernels $(SANITIZED)/kernels --output $(SANITIZED) --seconds 600

clean:
	rm -rf $(VENV)
