# Everything a fresh machine with Python 3.11 and make needs. `make` alone lists the targets.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
TIER   ?= cpu
PORT   ?= 8000
ARGS   ?=
DEVICE ?= cuda
MINUTES ?= 9
# All tests run in a worker more than there are cores, since some wait for processes, and slow ones in two
# more; some of them in one process. A worker holds torch, hence a limit.
CORES   := $(shell getconf _NPROCESSORS_ONLN)
SPREAD  := --dist worksteal --maxprocesses 8
WORKERS := $(if $(ARGS),,-n $(shell expr $(CORES) + 1) $(SPREAD))
SLOW    := $(if $(ARGS),,-n $(shell expr $(CORES) + 2) $(SPREAD))

LOCKS   := requirements.lock requirements.nodeps.lock requirements.hashes.lock pyproject.toml
STAMP   := .venv/installed-$(shell cat $(LOCKS) | cksum | tr -d ' ')
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1
PIP     := .venv/bin/python -m pip install -q --disable-pip-version-check
# Threads of torch that wait for work sleep instead of taking a core from one another.
export GOMP_SPINCOUNT = 0

.DEFAULT_GOAL := help
.PHONY: help book test soak gpu lab pdf pack serve lint clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

book: $(STAMP) ## Execute the notebooks at TIER=cpu (or smoke, gpu, paper) and render the book
	@echo "book: executing the notebooks at tier '$(TIER)' and rendering to _build/html"
	@.venv/bin/moebook book --tier $(TIER)

test: $(STAMP) ## Run the tests, without a network (ARGS="tests/nn -k router" for some of them)
	@echo "test: running the tests with the network cut off"
	@$(OFFLINE) .venv/bin/python -m pytest $(WORKERS) $(ARGS)

soak: $(STAMP) ## Run the slow tests: clusters that lose nodes, kills, every GPU step on a CPU
	@echo "soak: running what is slow by nature, with the network cut off"
	@$(OFFLINE) .venv/bin/python -m pytest -m soak $(SLOW) $(ARGS)

# Without $(STAMP): a machine with a GPU may have a torch of its own, and no way to install.
gpu: ## Run for MINUTES=9 what needs a GPU and has not run (ARGS=--list tells; DEVICE=cpu tries it)
	@$(OFFLINE) $(or $(wildcard .venv/bin/python),$(PYTHON)) -m recipes.gpu --device $(DEVICE) --minutes $(MINUTES) $(ARGS)

lab: $(STAMP) ## Open the notebooks in JupyterLab, which is installed the first time
	@test -x .venv/bin/jupyter-lab || { echo "lab: installing JupyterLab into .venv"; $(PIP) -e '.[lab]'; }
	@.venv/bin/jupyter lab $(ARGS) notebooks

pdf: $(STAMP) ## Print all pages of the rendered book into _build/moebook.pdf, with Chromium
	@test -f _build/html/index.html || { echo "pdf: no book in _build/html; run 'make book' first" >&2; exit 2; }
	@echo "pdf: rendering the book on one page and printing it, a few minutes"
	@.venv/bin/python -m workshop.pdf

pack: $(STAMP) ## Put book, notebooks, exercises, slides and wheels into _build/pack, and try it offline
	@test -f _build/html/index.html || { echo "pack: no book in _build/html; run 'make book' first" >&2; exit 2; }
	@echo "pack: book, notebooks, exercises, slides and a wheelhouse for machines like this one"
	@.venv/bin/python -m workshop.pack

serve: $(STAMP) ## Show the rendered book in a browser, on PORT=8000
	@.venv/bin/moebook serve --port $(PORT)

lint: $(STAMP) ## Check style, types and layers
	@echo "lint: ruff, mypy, import-linter"
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-logo

clean: ## Remove what `book` and `test` wrote (keeps .venv, runs/ and results/)
	@echo "clean: removing the rendered book, executed notebooks and tools' caches"
	@rm -rf _build book/notebooks book/_generated build .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache

# The stamp is named by what the locks and pyproject.toml hold, so that .venv is renewed when that changes.
# With HASHES=1 only files that requirements.hashes.lock lists are installed.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 5))' 2>/dev/null || \
	  { echo "set-up: needs Python 3.11.5 or newer, as the locked versions do; '$(PYTHON) -V' says: $$($(PYTHON) -V 2>&1); name one with PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "set-up: installing requirements.lock into .venv (a few minutes the first time)"
	@rm -f .venv/installed-*
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
ifdef HASHES
	@awk '/^(setuptools|wheel)==/,!/\\$$/' requirements.hashes.lock > .venv/build.lock
	@$(PIP) --no-deps --require-hashes -r .venv/build.lock
	@$(PIP) --no-deps --require-hashes --no-build-isolation -r requirements.hashes.lock
else
	@$(PIP) -r requirements.lock
	@$(PIP) --no-deps -r requirements.nodeps.lock
endif
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
