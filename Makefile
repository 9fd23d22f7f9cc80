# The verbs of this repository; `make` alone lists them. Everything runs in $(VENV), made from $(PYTHON) on first use.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# On two cores: some tests wait, for a cluster or a rule, and the others have the cores meanwhile. Few of make test do.
PROCESSES ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-again test-long test-long-again test-vm test-ends times mutants check check-code check-docs check-docs-long docs format lines bench bench-conformance clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## install memfit and what its tests need into .venv; runs again when the requirements change
	@$(BIN)/python -m compileall -q src systems  # where PYTHONDONTWRITEBYTECODE is set, each job would compile it anew

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "memfit needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1):" \
	         "name another one, for example: make install PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml systems/pyproject.toml tools/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c tools/constraints.txt -e '.[dev]' -e './systems[all]'
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true  # on all cores; some of it is no Python 3
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true  # pytest compiles the tests once, not each worker
	@touch $@ $(VENV)/.demo

$(VENV)/.demo: pyproject.toml tools/constraints.txt | $(BIN)/python
	@echo "installing memfit and PyTorch into $(VENV): one to three minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tools/constraints.txt -e '.[torch]' scikit-learn
	@touch $@

demo: $(VENV)/.demo ## run five folds under one limit, without memfit and with it; kill one, and go on
	@echo "compiling memfit" && $(BIN)/python -m compileall -q src/memfit examples/images
	@$(BIN)/python benchmarks/demo.py $(ARGS)

# Tests that share something made once stay on one worker; the others go wherever a worker waits.
PYTEST = folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && trap 'exit 130' INT && trap 'exit 143' TERM && \
  echo "temporary files: $$folder, removed at the end" && \
  env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 TMPDIR="$$folder" \
  $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder --basetemp="$$folder/pytest"

test: install ## run all fast tests and one proof of each promise, in three minutes; names what was skipped (ARGS are handed to pytest; PROCESSES=2 for less memory)
	@$(PYTEST) -n $(or $(PROCESSES),4) -m "core or not (slow or long)" --junitxml=build/test.xml $(ARGS)

test-long: install ## run what make test leaves out: real processes, kills, frameworks, the workloads, a real Slurm
	@$(PYTEST) -n $(or $(PROCESSES),6) -m "(slow or long) and not core" --junitxml=build/test-long.xml $(or $(ARGS),tests systems/tests)

test-again test-long-again: install
	@$(PYTEST) --last-failed --last-failed-no-failures=none --junitxml=build/again.xml tests systems/tests $(ARGS)

test-fast: install ## run the tests that take less than 0.3 s, while you work (ARGS as above); lists those that do not
	@$(PYTEST) -n 2 -q -m "not (slow or core or long)" --durations=10 --durations-min=0.5 $(ARGS)

times: ## print where the seconds of the last make test went, by file (ARGS="--tests", or further reports: build/test-long.xml)
	@$(BIN)/python tools/times.py build/test.xml $(ARGS)

mutants: install ## change the library in one place at a time; how many changes make test notices (ARGS="--modules 60 --each 3 --seed 1")
	$(BIN)/python tools/mutants.py $(ARGS)

test-ends: install ## run tests with the oldest or the newest Python, torch and frameworks (ARGS=oldest, newest or "both --light")
	@$(BIN)/python tools/ends.py $(ARGS)

test-vm: install ## run the tests that need cgroup v2 in a small virtual machine (needs root and QEMU; ARGS as above)
	$(BIN)/python tests/vm/run.py $(ARGS)

check: check-code docs check-docs ## check format, lint, types, import layers, circles, dead code and sizes, and run the commands in the docs

check-code: install
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/find_circles.py
	$(BIN)/python tools/find_dead.py
	$(BIN)/python tools/rooms.py --check

# What a user meets first is checked with every change; the others in CI.
DOCS := README.md docs/quickstart.md docs/folds.md docs/commands.md docs/stages.md docs/training.md docs/data.md
DOCS_LONG := docs/frameworks/exact.md docs/frameworks/accelerate.md docs/frameworks/huggingface.md docs/frameworks/lightning.md docs/your-script.md docs/workload.md docs/loading.md docs/workflow.md docs/estimate.md docs/diagnose.md docs/slurm.md docs/launch.md docs/plan.md docs/tune.md systems/memfit_workloads/recipes/README.md systems/memfit_workloads/trajectory/README.md

check-docs: install
	@printf '%s\n' $(DOCS) | xargs -P 2 -n 1 $(BIN)/python tools/run_docs.py

check-docs-long: install ## run the commands in the other documents
	@$(MAKE) --no-print-directory check-docs DOCS="$(DOCS_LONG)"

docs: install ## build the documents as a site in build/site
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tools/constraints.txt zensical
	rm -rf build/docs build/site && mkdir -p build && cp -r docs build/docs
	$(BIN)/python tools/list_names.py > build/docs/api.md
	for page in video recipes forecaster trajectory; do sed "s#(../../../docs/#(#g" systems/memfit_workloads/$$page/README.md > build/docs/$$page.md; done
	sed -E 's#\(docs/#(#g; s#\(systems/memfit_workloads/([a-z]+)/README\.md#(\1.md#g' README.md > build/docs/index.md
	sed -i -E 's#\(\.\./systems/memfit_workloads/([a-z]+)/README\.md#(\1.md#g' build/docs/*.md
	for page in ARCHITECTURE CONTRIBUTING CHANGELOG; do sed -E 's#\(docs/#(#g' $$page.md > build/docs/$$page.md; done
	sed -i -E 's#\((\.\./)?tests/public_names\.txt#(api.md#g; s#\(\.\./(ARCHITECTURE|CHANGELOG|CONTRIBUTING)\.md#(\1.md#g' build/docs/*.md
	$(BIN)/zensical build --clean --strict

format: install ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lines: install ## print what each room weighs and may weigh (ARGS="--since COMMIT", or --write to lower the numbers to today's)
	@$(BIN)/python tools/rooms.py $(ARGS)

NAME ?=
bench: install ## run a benchmark (NAME=stress ARGS="--jobs 60"); without NAME, list them
	@$(BIN)/python benchmarks/harness.py $(if $(NAME),run $(NAME) $(ARGS),list)

bench-conformance: install ## 64 moments of three frameworks, alone and with memfit, and the page's tables (ARGS="--pairwise")
	@mkdir -p build/conformance
	@for one in huggingface lightning accelerate; do for with in "" --plain --with-memfit; do \
	  PYTHONPATH=conformance $(BIN)/python -m memfit_conformance $$one $$with --json build/conformance/$$one$$with.json $(ARGS); \
	done; done
	@PYTHONPATH=conformance $(BIN)/python -m memfit_conformance table build/conformance/*.json

clean: ## remove build outputs and caches; keeps .venv, runs and panels
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
