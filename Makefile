# Two commands do everything: `make demo` and `make test`.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# Where it is set, each of the thousands of processes of a test run compiles this package anew (1 s).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-kube test test-processes test-kube test-clients test-attack test-frameworks test-nodes test-gpu test-ui ui soak test-matrix test-matrix-short dist sbom check check-rest reference docs lock bench bench-gpu clean sim chaos scoreboard ray-env frameworks-env trackers-env demo-ray

setup: $(VENV)/.done

$(VENV)/.done: requirements.lock pyproject.toml tools/setup.sh
	@tools/setup.sh $(PYTHON) $(VENV)

demo: setup
	@$(BIN)/python examples/demo.py

# The same on a real Kubernetes with three nodes on this machine; needs what e2e-kube needs.
demo-kube: setup
	@$(BIN)/python examples/demo_kube.py

# The tiers of tests (tests/tiers.py says which test belongs to which).  `make test` is the static checks, the tests
# that need no real time with one real-process test for each promise, and 500 simulated worlds.
# Three test processes for two processors: many tests wait for processes that they start.  A test process that
# crashes ends the run: a new one would only repeat the test that crashed it.
PROCESSES ?= $(shell n=$$(nproc); echo $$((n < 10 ? (3 * n + 1) / 2 : 16)))
PYTEST = $(BIN)/python -m pytest -n $(PROCESSES) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
# ALL=1 adds the heavy ones, which take both cores for minutes.
RUN_TIER = $(PYTEST) $(if $(ALL),--complete) --tier
test: check
	@$(RUN_TIER) unit
	@$(BIN)/python -m unbroken.sim --seeds 500

test-processes test-clients test-attack: setup
	@$(RUN_TIER) $(@:test-%=%)

# A real control plane.  Then a job whose nodes are processes, on a control plane with scheduler and controllers;
# ALL=1: each of these tests.
JOB_PATH := $(foreach name,control hangs hung inprocess pods scripts starts torch workers,tests/e2e/test_job_$(name).py)
test-kube: setup
	@$(RUN_TIER) kube
	@UNBROKEN_E2E=real $(BIN)/python -m pytest -rs -m "not heavy" $(if $(ALL),$(JOB_PATH),tests/e2e/test_job_workers.py)

# Ray, and frameworks of training, in environments of their own (`make ray-env frameworks-env trackers-env`).
test-frameworks: setup
	@$(BIN)/python -m pytest --complete --tier frameworks

# Real nodes: kubelets with containerd beside a real control plane; needs root (CONTRIBUTING.md).
test-nodes: setup
	@$(BIN)/python -m pytest -rs --complete --tier nodes

test-gpu: setup
	@$(BIN)/python -m pytest -rs --complete --tier gpu

# The live page: types, tests of its parts, the built files compared with a new build, then a real Chromium.
test-ui: ui/node_modules/.done $(VENV)/.browser
	@cd ui && npm run --silent check && npm run --silent types -- --check && npm run --silent test
	@cd ui && npm run --silent build -- --logLevel warn --outDir ../build/ui
	@diff -r build/ui src/unbroken/cli/page/built || { echo "the built page is not that of ui/: make ui"; exit 1; }
	@$(BIN)/python -m pytest --complete --tier browser tests/browser

# Builds the page from ui/ into the package.
ui: ui/node_modules/.done
	@cd ui && npm run --silent types && npm run --silent build -- --logLevel warn

ui/node_modules/.done: ui/package-lock.json
	@command -v npm > /dev/null || { echo "ui/ needs Debian's nodejs and npm: apt-get install nodejs npm"; exit 1; }
	@cd ui && npm ci --silent --no-audit --no-fund
	@touch $@

$(VENV)/.browser: tools/browser-requirements.txt | setup
	@$(BIN)/pip install --quiet --disable-pip-version-check --requirement $< 2> >(grep -v 'is ignored: it is neither' >&2)
	@touch $@

# A tier again and again in random order, beside LOAD processes that only compute; keeps the output of failed rounds.
TIER ?= unit
ROUNDS ?= 20
LOAD ?= 4
soak: setup
	@$(BIN)/python tools/soak.py --tier $(TIER) --rounds $(ROUNDS) --load $(LOAD) -n $(PROCESSES)

# The wheel of the last commit in clean environments: every Python from 3.11 to 3.14 that this machine has, pip, pipx
# and uvx, newest and lowest dependencies.  The short form, for CI: this Python by pip, one job of two ranks.
test-matrix: setup
	@$(BIN)/python tools/matrix.py

test-matrix-short: setup
	@$(BIN)/python tools/matrix.py --short

# Wheel and source distribution of the last commit, in build/dist; the same bytes each time.
dist: setup
	@$(BIN)/python tools/dist.py

# CycloneDX SBOM of the Python packages in the operator's image, in build/sbom; its program has an environment of its own.
sbom: setup $(VENV)/sbom/.done
	@$(BIN)/python tools/sbom.py $(VENV)/sbom/bin/cyclonedx-py

$(VENV)/sbom/.done: tools/sbom-requirements.lock
	@$(PYTHON) -m venv --clear $(VENV)/sbom
	@$(VENV)/sbom/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
	    --requirement $< 2> >(grep -v 'is ignored: it is neither' >&2)
	@touch $@

# A real control plane whose parts are killed and frozen while a job fails; CHAOS_ROUNDS=10 runs as many seeds.
SEED ?= 0
CHAOS_ROUNDS ?= 1
chaos: setup
	@UNBROKEN_CHAOS=$(SEED):$$(($(SEED) + $(CHAOS_ROUNDS))) $(BIN)/python -m pytest -m heavy tests/chaos/test_storms.py

# mypy takes as long as all the others, which run beside it.
check: setup
	@$(BIN)/mypy & types=$$!; \
	$(MAKE) --no-print-directory check-rest; rest=$$?; \
	wait $$types && exit $$rest

check-rest:
	@$(BIN)/ruff check src tests tools benchmarks examples
	@$(BIN)/ruff check --quiet --config tools/clocks_of_tests.toml tests
	@$(BIN)/python tools/check_patterns.py src/unbroken
	@$(BIN)/python tools/check_numbers.py src/unbroken
	@$(BIN)/python tools/banned_calls.py src
	@$(BIN)/python tools/status_writes.py tests
	@$(BIN)/python tools/reference.py --check
	@$(BIN)/lint-imports --config pyproject.toml > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@$(BIN)/python tools/lengths.py src/unbroken

# Writes docs/reference/ again from the source; `make check` fails if a page is out of date.
reference: setup
	@$(BIN)/python tools/reference.py

# The documentation site, in build/site.  mkdocs has an environment of its own, which only this needs,
# with the program that draws the diagrams (an npm package), so that the site needs no network.
MERMAID := 11.12.0
MERMAID_SHA256 := 93492e4d609be83653a41c435f4cbd7e74419f7fa6b4fc90a8c983195f64af82
docs: $(VENV)/docs/.done
	@$(VENV)/docs/bin/python tools/docs.py

$(VENV)/docs/.done: tools/docs-requirements.lock
	@[[ -x $(VENV)/docs/bin/python ]] || $(PYTHON) -m venv $(VENV)/docs
	@$(VENV)/docs/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
	    --requirement $< 2> >(grep -v 'is ignored: it is neither' >&2)
	@rm -f $(VENV)/docs/mermaid-*.tgz
	@cd $(VENV)/docs && npm pack --silent mermaid@$(MERMAID) > /dev/null
	@echo "$(MERMAID_SHA256)  $(VENV)/docs/mermaid-$(MERMAID).tgz" | sha256sum --check --quiet
	@tar -xzf $(VENV)/docs/mermaid-$(MERMAID).tgz -C $(VENV)/docs --strip-components 2 package/dist/mermaid.min.js
	@touch $@

# Ray Train on a RayCluster that loses a worker pod, a node and its head.
demo-ray: setup ray-env
	@RAY_ENV=$(RAY_ENV) $(BIN)/python examples/demo_ray.py

# Ray with torch and Lightning in an environment of its own (1.6 GB), for `unbroken up --image-env`, `make demo-ray` and
# tests/e2e/test_ray.py.  An environment of Ray alone runs all but examples/ray/fsdp_ray.py.
RAY_ENV ?= .ray-env
ray-env: $(RAY_ENV)/.with-torch

$(RAY_ENV)/.with-torch:
	@echo "installing Ray, torch and Lightning in $(RAY_ENV) (once, some minutes) ..."
	@$(PYTHON) -m venv $(RAY_ENV)
	@$(RAY_ENV)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 2> >(grep -v 'is ignored: it is neither' >&2)
	@$(RAY_ENV)/bin/pip install --quiet --disable-pip-version-check "ray[default,train]==2.60.*" "lightning==2.6.*" \
	    2> >(grep -v 'is ignored: it is neither' >&2)
	@touch $@

# Hugging Face Trainer, Accelerate and Lightning in an environment of their own (1.5 GB), all versions fixed.
FRAMEWORKS_ENV ?= .frameworks-env
frameworks-env: $(FRAMEWORKS_ENV)/.done

$(FRAMEWORKS_ENV)/.done: tools/frameworks-requirements.txt
	@echo "installing frameworks of training in $(FRAMEWORKS_ENV) (once, some minutes) ..."
	@$(PYTHON) -m venv $(FRAMEWORKS_ENV)
	@$(FRAMEWORKS_ENV)/bin/pip install --quiet --disable-pip-version-check --requirement $< 2> >(grep -v 'is ignored: it is neither' >&2)
	@touch $@

TRACKERS_ENV ?= .trackers-env
trackers-env: $(TRACKERS_ENV)/.done

$(TRACKERS_ENV)/.done: tools/trackers-requirements.txt
	@echo "installing MLflow and Weights & Biases in $(TRACKERS_ENV) (once, a minute) ..."
	@$(PYTHON) -m venv $(TRACKERS_ENV)
	@$(TRACKERS_ENV)/bin/pip install --quiet --disable-pip-version-check --requirement $< 2> >(grep -v 'is ignored: it is neither' >&2)
	@touch $@

# The job's machines in simulated worlds; each failure is printed with the command that repeats it.
# FRESH=COMMIT adds 3,000 worlds whose seeds are drawn from the commit's hash.
SEEDS ?= 5000
FRESH ?=
sim: setup
	@$(BIN)/python -m unbroken.sim --seeds $(SEEDS) $(if $(FRESH),--fresh $(FRESH))

bench: setup
	@$(BIN)/python benchmarks/api.py
	@$(BIN)/python benchmarks/recovery.py --quick
	@$(BIN)/python benchmarks/agent_latency.py
	@$(BIN)/python benchmarks/node_faults.py --quick

# Restarts, snapshots and hangs on the GPUs of this machine; $(GPU_PYTHON) has this package and a CUDA torch.
GPU_PYTHON ?= $(BIN)/python
bench-gpu: setup
	@$(GPU_PYTHON) benchmarks/gpu/run.py

# What finds which fault, and whom it blames: a few faults, ours and torchrun, two minutes.
scoreboard: setup
	@$(BIN)/python benchmarks/scoreboard.py --quick

# Rewrites the locks from pyproject.toml: the one of development, and those of the images, which hold the same
# versions (the second one with boto3); and that of the documentation site.  torch is in neither: setup installs the CPU build, users bring their own.
PIP_COMPILE = $(BIN)/pip-compile -q --generate-hashes --strip-extras --allow-unsafe --no-emit-index-url --no-emit-find-links --no-emit-trusted-host
lock: setup
	@$(PIP_COMPILE) --extra otel --extra dev -o requirements.lock pyproject.toml
	@$(PIP_COMPILE) --extra otel --build-deps-for wheel --constraint requirements.lock -o deploy/requirements.lock pyproject.toml
	@$(PIP_COMPILE) --extra otel --extra aws --build-deps-for wheel --constraint deploy/requirements.lock -o deploy/aws-requirements.lock pyproject.toml
	@$(PIP_COMPILE) -o tools/docs-requirements.lock tools/docs-requirements.in
	@$(PIP_COMPILE) -o tools/sbom-requirements.lock tools/sbom-requirements.in

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
