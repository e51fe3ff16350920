# Every target makes its own .venv on first use; nothing but python3.11 (or a newer python3), pip and a C
# compiler need to be there. `make demo` and `make test` are the two to begin with.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
unexport PYTHONPATH

HF_OLDEST := 5.0.0
KATEX := build/katex-0.16.11

.PHONY: help setup hooks lab demo test test-slow test-hf browser browser-test browser-site docs refresh outputs clean

help:
	@echo 'make demo       find a key in 32,768 tokens with the model in the package'
	@echo 'make test       every check: notebooks, tests, site, wheel'
	@echo 'make test-slow  the cells and tests that are marked slow'
	@echo 'make test-hf    the part for transformers, with the installed version and with the oldest that is supported'
	@echo 'make browser-test  every notebook run in JupyterLab, every page of the site, in headless Chromium (NB="04_ring ..." for'
	@echo '                   some notebooks alone); pictures in build/screenshots'
	@echo 'make browser-site  the part of it that looks at pages'
	@echo 'make browser       what both need: Chromium, its driver, and KaTeX'
	@echo 'make docs       build the site into _docs (no Quarto needed)'
	@echo 'make lab        open the notebooks in JupyterLab'
	@echo 'make refresh    run the notebooks and save their outputs in place (NB="nbs/04_ring.ipynb ..." for some)'
	@echo 'make outputs    are the saved outputs what the code gives today?'
	@echo 'make setup      the environment alone, in .venv'
	@echo 'make hooks      git and Jupyter hooks that keep notebooks clean (writes to the home directory)'
	@echo 'make clean      remove what the targets wrote, but for .venv'

$(STAMP): settings.ini setup.py constraints.txt
	@[ -n "$(PYTHON)" ] || { echo 'Python 3.11 or newer is needed: python3 is not on the PATH'; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; try make PYTHON=/path/to/python3.11")'
	@echo "installing into $(VENV) (a few minutes on first use)"
	@[ -x $(BIN)/python ] && $(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv $(VENV) 2>/dev/null \
	  || { rm -rf $(VENV); "$(PYTHON)" -m venv --without-pip $(VENV) && "$(PYTHON)" -m pip --python $(BIN)/python install -q pip; }
	@$(PIP) install -q -c constraints.txt torch
	@$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)

hooks: $(STAMP)
	$(BIN)/nbdev_install_hooks

lab: $(STAMP)
	$(BIN)/jupyter lab nbs

demo: $(STAMP)
	@mkdir -p results-demo
	$(BIN)/gptoss-lite passkey --context-lengths 4096 8192 16384 32768 --n-trials 5 --position spread \
	  --json results-demo/passkey.json --plot results-demo/passkey.png

test: $(STAMP)
	@$(BIN)/python .ci/checks.py

test-slow: $(STAMP)
	@$(BIN)/python .ci/checks.py --slow

build/transformers-$(HF_OLDEST)/.installed: | $(STAMP)
	@$(PIP) install -q --no-deps --upgrade --target $(@D) transformers==$(HF_OLDEST) 'huggingface_hub>=1.3,<2' 'tokenizers>=0.22,<0.23'
	@touch $@

test-hf: $(STAMP) build/transformers-$(HF_OLDEST)/.installed
	@$(BIN)/python -m pytest -q tests/test_hf.py
	@PYTHONPATH=$(CURDIR)/build/transformers-$(HF_OLDEST) $(BIN)/python -m pytest -q tests/test_hf.py

$(KATEX)/package: | $(STAMP)
	@command -v npm >/dev/null || { echo 'npm is needed, for a copy of KaTeX: without a network no formula would show'; exit 1; }
	@mkdir -p $(@D)
	@cd $(@D) && tar -xzf "$$(npm pack --silent $(@D:build/katex-%=katex@%))"

$(VENV)/.browser: $(STAMP)
	@if ! command -v chromedriver >/dev/null && [ -z "$${CHROMEWEBDRIVER:-}" ] && [ "$$(uname)" = Linux ]; then \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo 'Chromium and its chromedriver are needed; on Debian and Ubuntu: sudo apt-get install chromium chromium-driver'; exit 1; }; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium chromium-driver >/dev/null; \
	fi
	@$(PIP) install -q -c constraints.txt selenium
	@touch $@

browser: $(VENV)/.browser $(KATEX)/package

browser-test: browser
	@$(BIN)/python -m pytest -q tests/browser$(if $(NB),/test_lab.py --nb '$(NB)') --katex $(KATEX)/package

browser-site: browser
	@$(BIN)/python -m pytest -q tests/browser --ignore tests/browser/test_lab.py --katex $(KATEX)/package

docs: $(STAMP)
	@$(BIN)/python .ci/site.py $(wildcard $(KATEX)/package)

NB ?=
refresh: $(STAMP)
	@$(BIN)/python .ci/notebooks.py refresh $(NB)
	@$(BIN)/python .ci/readme.py

outputs: $(STAMP)
	@$(BIN)/python .ci/notebooks.py current $(NB)

clean:
	rm -rf _docs _proc build dist *.egg-info results-demo .pytest_cache .hypothesis nbs/nbdev.yml
	find gptoss_lite tests .ci nbs -name __pycache__ -prune -exec rm -rf {} +
