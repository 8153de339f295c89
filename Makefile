# make chat   all set-up, then chat with the demo model in this terminal
# make test   all set-up, then the tests
# make check  lint, format, types, and whether the documents match the tree
# Set-up happens once, in .venv; it is done again when what it depends on changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.set-up-to-run
DEV_STAMP := $(VENV)/.set-up-to-develop
CHECKED := engine tuiwork tests scripts

.PHONY: chat test test-slow check fmt clean

chat: $(RUN_STAMP)
	@$(BIN)/tuiwork $(ARGS)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(ARGS)

# Exit status 5 of pytest means that there are no such tests.
test-slow: $(DEV_STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS) || [ $$? -eq 5 ]

check: $(DEV_STAMP)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/python scripts/check_layout.py

fmt: $(DEV_STAMP)
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

clean:
	rm -rf $(VENV) dist build

$(RUN_STAMP): pyproject.toml requirements/llama.txt scripts/set-up scripts/compile_core.py \
  $(wildcard engine/native/*.c engine/native/*.h)
	@PYTHON="$(PYTHON)" scripts/set-up $(VENV) .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@PYTHON="$(PYTHON)" scripts/set-up $(VENV) '.[dev]'
	@touch $@
