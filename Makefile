# The verbs of this repository; `make` alone lists them. Everything runs in $(VENV), made from $(PYTHON) on first use.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-long test-vm test-ends times mutants check check-code check-docs check-docs-long docs format lines bench-ground-truth bench-estimate bench-diagnosis bench-folds bench-stress bench-overhead bench-starts bench-folklore bench-loaders bench-sequences bench-gpu bench-slurm bench-trajectory bench-decision bench-ranker bench-forecaster bench-video bench-recipes bench-tune bench-policy bench-makespan bench-conformance bench-faults bench-host-plan clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## install memfit and what its tests need into .venv; runs again when the requirements change
	@$(BIN)/python -m compileall -q src  # where PYTHONDONTWRITEBYTECODE is set, each job would compile it anew

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "memfit needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1):" \
	         "name another one, for example: make install PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true  # on all cores; some of it is no Python 3
	@touch $@ $(VENV)/.demo

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing memfit and PyTorch into $(VENV): one to three minutes"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[torch]' scikit-learn
	@touch $@

demo: $(VENV)/.demo ## run five folds under one limit, without memfit and with it; kill one, and go on
	@echo "compiling memfit" && $(BIN)/python -m compileall -q src/memfit examples/images
	@$(BIN)/python benchmarks/demo.py $(ARGS)

# Tests that share something made once stay on one worker; the others go wherever a worker waits.
PYTEST = folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && trap 'exit 130' INT && trap 'exit 143' TERM && \
  echo "temporary files: $$folder, removed at the end" && \
  env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 TMPDIR="$$folder" \
  $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder --basetemp="$$folder/pytest"

test: install ## run the tests of memfit and a smoke of each workload in four processes; names what was skipped and why (ARGS are handed to pytest)
	@$(PYTEST) -n 4 -m "not long" --junitxml=build/test.xml $(ARGS)

test-long: install ## run what make test leaves out: the workloads' kills, a real Slurm, all moments, the other documents
	@$(PYTEST) -n 4 -m long --junitxml=build/test-long.xml $(ARGS)
	@test -n "$(WITHOUT_DOCS)" || $(MAKE) --no-print-directory check-docs-long

test-fast: install ## run the tests that take less than 0.3 s, while you work (ARGS as above); lists those that do not
	@$(PYTEST) -n 2 -q -m "not slow and not long" --durations=10 --durations-min=0.5 $(ARGS)

times: ## print where the seconds of the last make test went, by file (ARGS="--tests", or another report)
	@$(BIN)/python tools/times.py build/test.xml $(ARGS)

mutants: install ## change ten core modules in one place at a time; how many changes their own tests see (ARGS="memory/_admission")
	$(BIN)/python tools/mutants.py $(ARGS)

test-ends: install ## run tests with the oldest or the newest Python, torch and frameworks (ARGS=oldest, newest or "both --light")
	@$(BIN)/python tools/ends.py $(ARGS)

test-vm: install ## run the tests that need cgroup v2 in a small virtual machine (needs root and QEMU; ARGS as above)
	$(BIN)/python tests/vm/run.py $(ARGS)

check: check-code docs check-docs ## check format, lint, types, import layers, circles and dead code, and run the commands in the docs

check-code: install
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/find_circles.py
	$(BIN)/python tools/find_dead.py

# What a user meets first is checked with every change; the others with make test-long.
DOCS := README.md docs/quickstart.md docs/folds.md docs/commands.md docs/stages.md docs/training.md docs/data.md
DOCS_LONG := docs/frameworks/accelerate.md docs/frameworks/huggingface.md docs/frameworks/lightning.md docs/your-script.md docs/workload.md docs/loading.md docs/workflow.md docs/estimate.md docs/diagnose.md docs/slurm.md docs/launch.md docs/plan.md docs/tune.md src/memfit_workloads/recipes/README.md src/memfit_workloads/trajectory/README.md

check-docs: install
	@printf '%s\n' $(DOCS) | xargs -P 2 -n 1 $(BIN)/python tools/run_docs.py

check-docs-long: install
	@$(MAKE) --no-print-directory check-docs DOCS="$(DOCS_LONG)"

docs: install ## build the documents as a site in build/site
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt zensical
	rm -rf build/docs build/site && mkdir -p build && cp -r docs build/docs
	for page in video recipes forecaster trajectory; do sed "s#(../../../docs/#(#g" src/memfit_workloads/$$page/README.md > build/docs/$$page.md; done
	sed -E 's#\(docs/#(#g; s#\(src/memfit_workloads/([a-z]+)/README\.md#(\1.md#g' README.md > build/docs/index.md
	sed -i -E 's#\(\.\./src/memfit_workloads/([a-z]+)/README\.md#(\1.md#g' build/docs/*.md
	sed 's#(docs/#(#g' ARCHITECTURE.md > build/docs/ARCHITECTURE.md
	sed -E 's#\(docs/#(#g; s#\(src/memfit_workloads/([a-z]+)/README\.md#(\1.md#g' CHANGELOG.md > build/docs/CHANGELOG.md
	$(BIN)/zensical build --clean --strict

format: install ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lines: install ## print the lines of each package (ARGS="--since COMMIT" for those of a commit beside them)
	@$(BIN)/python tools/lines.py $(ARGS)

bench-folds: install ## naive folds against memfit's under one real memory limit (needs root and cgroup v1)
	$(BIN)/python benchmarks/folds.py $(ARGS)

bench-stress: install ## 300 jobs that burst, leak, lie and fork under one real limit (needs root and a memory cgroup)
	$(BIN)/python benchmarks/stress.py $(ARGS)

bench-starts: install ## a run that does nothing, and a job's first line: forked and in a new interpreter
	$(BIN)/python benchmarks/starts.py $(ARGS)

bench-overhead: install ## a safe step against a plain loop, several models
	$(BIN)/python benchmarks/overhead.py $(ARGS)

bench-folklore: install ## cleaning up every few steps against never
	$(BIN)/python benchmarks/folklore.py $(ARGS)

bench-loaders: install ## day windows by memfit's loader beside pandas, polars, HF datasets and LitData
	$(BIN)/python benchmarks/loaders.py $(ARGS)

bench-sequences: install ## padded token batches by memfit's loader beside PyTorch's
	$(BIN)/python benchmarks/sequences.py $(ARGS)

bench-decision: install ## size, coverage and power of a comparison of two rankings, by simulation
	$(BIN)/python benchmarks/decision.py $(ARGS)

bench-video: install ## the video classifier: ten kills, a leak on purpose, collections, decoding, 300 clips under a limit (ARGS=--part kills)
	$(BIN)/python benchmarks/video.py $(ARGS)

bench-recipes: install ## the recipe fine-tune: an index of 6 million lines, ten kills, what compiling gains (ARGS="--part kills")
	$(BIN)/python benchmarks/recipes.py $(ARGS)

bench-ranker: install ## the ranker's stages: folds side by side against one by one, and ten kills
	$(BIN)/python benchmarks/ranker.py $(ARGS)

bench-tune: install ## a search of settings beside Optuna's own pool under one real limit (needs root; ARGS="--part told")
	$(BIN)/python benchmarks/tune.py $(ARGS)

bench-policy: install ## how jobs are admitted and grown, in simulated time, beside an oracle (ARGS="--mix 'slow growth'")
	$(BIN)/python benchmarks/policy.py $(ARGS)

bench-makespan: install ## 60 real jobs of four kinds under 2 GiB beside an oracle, plain pools and joblib
	$(BIN)/python benchmarks/makespan.py $(ARGS)

bench-forecaster: install ## what the forecaster's options change, over seeds with an interval; reading its wide store (ARGS="--part store")
	$(BIN)/python benchmarks/forecaster.py $(ARGS)

bench-ground-truth: install ## estimates beside published peaks (ARGS="--table FILE"; --peers asks other estimators too)
	$(BIN)/python benchmarks/ground_truth.py $(ARGS)

bench-gpu: ## what only a GPU can show, with the Python named by PYTHON, whose torch knows CUDA (ARGS="--part step")
	PYTHONPATH=src:benchmarks:$$PYTHONPATH $(PYTHON) benchmarks/gpu.py $(ARGS)

bench-slurm: install ## a preemption, killed controllers and supervisors, two nodes: on a real Slurm (needs root and its packages)
	$(BIN)/python benchmarks/slurm_runs.py $(ARGS)

bench-trajectory: install ## a training that dies at its first validation, and the same by memfit, on two nodes of a real Slurm (needs root)
	$(BIN)/python benchmarks/trajectory.py $(ARGS)

bench-estimate: install ## time and memory of estimating a 3B and an 8B model, and what of an XL model fits which GPU
	$(BIN)/python benchmarks/estimate.py $(ARGS)

bench-diagnosis: install ## verdicts on the messages of the rules, or on labelled logs (ARGS="--corpus FILE")
	$(BIN)/python benchmarks/diagnosis.py $(ARGS)

bench-faults: install ## a hundred faults of four ranks: out of memory, errors, kills and hangs at each place (ARGS="--launch SIGKILL")
	$(BIN)/python benchmarks/faults.py $(ARGS)

bench-host-plan: install ## forecast and measured host memory of 24 trainings (needs root and cgroup v1; ARGS="--row 3 --json FILE")
	$(BIN)/python benchmarks/host_plan.py $(ARGS)

bench-conformance: install ## 64 moments of three frameworks, alone and with memfit, and the page's tables (ARGS="--pairwise")
	@mkdir -p build/conformance
	@for one in huggingface lightning accelerate; do for with in "" --plain --with-memfit; do \
	  PYTHONPATH=conformance $(BIN)/python -m memfit_conformance $$one $$with --json build/conformance/$$one$$with.json $(ARGS); \
	done; done
	@PYTHONPATH=conformance $(BIN)/python -m memfit_conformance table build/conformance/*.json

clean: ## remove build outputs and caches; keeps .venv, runs and panels
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
