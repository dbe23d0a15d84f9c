# `make demo` and `make test` need nothing but Linux and Python 3.11 to 3.13: both set the environment up first.
VENV ?= .venv
PY := $(VENV)/bin/python
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PY) -m pytest
RUFF := $(PY) -m ruff

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-integration test-property e2e soak bench gpu-smoke sdk-conformance clients lint check docs pictures lock wheelhouse clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

setup: ## virtual environment with the pinned packages for CPU or CUDA, as detected (instant when nothing changed)
	@VENV="$(VENV)" images/install.sh
	@[ ! -e .git ] || git config core.hooksPath .githooks

demo: setup ## the whole loop with visible progress: fine-tune, publish, chat, switch modes under load
	@$(PY) -m appliance.demo

test: setup ## everything that must pass: lint, then unit, integration, property and end-to-end tests, and their times
	@images/run-tests.sh "$(PY)"

test-unit: setup ## unit tests only
	$(PYTEST) --numprocesses "$$(nproc)" --maxprocesses 8 --dist worksteal tests/unit

test-integration: setup ## tests that load torch, vLLM, Ray or DeepSpeed, only
	$(PYTEST) --numprocesses "$$(nproc)" --maxprocesses 8 --dist worksteal tests/integration

test-property: setup ## property tests only
	$(PYTEST) --numprocesses "$$(nproc)" --maxprocesses 8 --dist worksteal tests/property

e2e: setup ## end-to-end tests only: real box, real engines, real training
	$(PYTEST) tests/e2e

soak: setup ## the long runs, and new examples of each property
	$(PYTEST) -m soak --timeout 7200 tests
	$(PYTEST) --hypothesis-profile drawn tests/property

bench: setup ## each script in benchmarks/ in turn, then one table: claim, measured, aim, met or missed
	@failed=""; for script in benchmarks/[a-z]*.py; do echo "== $$script"; \
	  $(PY) -m "benchmarks.$$(basename "$$script" .py)" || { [ $$? -lt 128 ] || exit 1; failed="$$failed $$script"; }; done; \
	echo "== what was claimed, and what was measured"; $(PY) -m benchmarks._claims; \
	[ -z "$$failed" ] || { echo "not measured, their errors stand above:$$failed"; exit 1; }

gpu-smoke: ## on a machine with GPUs, after the install: ten minutes, a line per check and what to do (GPUS=8: how many there have to be; PARTS=copies,ranks: these alone)
	@$(PY) -m benchmarks.gpu.smoke $(if $(GPUS),--gpus $(GPUS)) $(if $(PARTS),--parts $(PARTS))

sdk-conformance: setup ## openai-python's own tests of our routes against a running box: stored things, and what real engines answer
	@data=$$(mktemp -d) && $(VENV)/bin/appliance up --detach --data-dir "$$data" --port 8799 && code=0 && \
	{ $(PY) -m tests.conformance.run --data-dir "$$data" || code=$$?; \
	  $(VENV)/bin/appliance down --data-dir "$$data"; rm -rf "$$data"; exit $$code; }

clients: setup ## real clients from the package registry against a box with a real model; writes docs/clients.md (half an hour)
	@$(PY) -m tests.clients.run

lint: setup ## ruff: its rules, and its format; no room larger than tests/tools/sizes.json says
	$(RUFF) check .
	$(RUFF) format --check .
	$(PY) -m tests.tools.sizes

check: setup ## before a commit, two minutes: lint, then types beside all unit tests
	@$(RUFF) check .
	@$(RUFF) format --check --quiet .
	@$(PY) -m mypy & types=$$!; $(PYTEST) --numprocesses "$$(nproc)" --maxprocesses 8 --dist worksteal tests/unit; \
	code=$$?; wait $$types && exit $$code

docs: setup ## all pages as a site in build/site, with each command and setting; looks nothing up when read
	@$(PY) -m tests.tools.reference build/docs
	@[ -x build/docs-env/bin/mkdocs ] || $(PY) -m venv build/docs-env
	@build/docs-env/bin/pip install --quiet mkdocs-material==9.8.2
	@build/docs-env/bin/mkdocs build --quiet --config-file docs/mkdocs.yml && echo "build/site/index.html"

pictures: setup ## take the pictures of the page in docs/ anew, in Debian's chromium-headless-shell
	@$(PY) -m tests.e2e.page_pictures docs

lock: ## resolve images/requirements/*.in again into cpu.txt, cuda.txt, test.txt and tracking.txt, with hashes
	images/lock.sh

# torch by string equality: pip may find another build of the same version first.
wheelhouse: setup ## all that a machine without a network installs, in one directory: build/wheelhouse
	@rm -rf build/wheelhouse build/lib && mkdir -p build/wheelhouse && cp -r images build/wheelhouse
	@read -r build _ < $(VENV)/.appliance-installed; \
	sed 's/^torch==/torch===/' "images/requirements/$$build.txt" > build/requirements.txt
	$(PY) -m pip download --no-deps --no-build-isolation --require-hashes -r build/requirements.txt -d build/wheelhouse
	$(PY) -m pip wheel --no-deps --no-build-isolation . -w build/wheelhouse

clean: ## remove the environment, caches and demo data
	rm -rf .venv .demo .benchmarks .pytest_cache .hypothesis .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
