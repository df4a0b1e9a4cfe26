.DEFAULT_GOAL := help

VENV  := .venv
PY    := $(VENV)/bin/python
JOBS  ?= 2

# MLX's backend: cpu, cuda12 or cuda13; none on macOS, where mlx brings Metal. What was chosen once stays.
BACKENDS := cpu cuda12 cuda13 none
BACKEND  ?= $(shell cat $(VENV)/.backend 2>/dev/null || { \
	if [ "$$(uname -s)" != Linux ]; then echo none; \
	elif nvidia-smi 2>/dev/null | grep -q 'CUDA Version: 12'; then echo cuda12; \
	elif [ -e /proc/driver/nvidia ] || nvidia-smi >/dev/null 2>&1; then echo cuda13; \
	else echo cpu; fi; })
BACKEND  := $(BACKEND)
STAMP    := $(VENV)/.setup-$(BACKEND)
comma    := ,
EXTRAS   := dev$(if $(filter-out none,$(BACKEND)),$(comma)$(BACKEND))
PACKAGES := mlx-cpu mlx-cuda-12 mlx-cuda-13
OTHERS   := $(filter-out $(patsubst cuda%,mlx-cuda-%,$(BACKEND:cpu=mlx-cpu)),$(PACKAGES))
CLIENTS  := .clients
PIP      := $(PY) -m pip --disable-pip-version-check --quiet

.PHONY: help setup doctor lint types test test-all test-system dist demo models bench-core bench-dropin bench-serve bench-latency bench-disk bench-remote bench-page bench-scale bench-fleet bench-traces bench-turns bench-kv soak \
	mac-check torture mutants problems schemas clients agents clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## Make .venv and install onefold there, editable, with the development tools and a BACKEND of MLX.

# Two backends write over each other's files, so all of them go before another one comes.
$(STAMP): pyproject.toml
ifneq ($(words $(BACKEND))-$(words $(filter $(BACKENDS),$(BACKEND))),1-1)
	@echo "BACKEND is one of $(BACKENDS), not '$(BACKEND)'" >&2; exit 1
endif
	@py=$$(command -v python3.11 || command -v python3) || { echo "Python 3.11 or later is needed" >&2; exit 1; }; \
	"$$py" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; $$py is older" >&2; exit 1; }; \
	echo "$$py -m venv $(VENV)"; "$$py" -m venv $(VENV)
	@if $(PIP) show $(OTHERS) >/dev/null 2>&1; then $(PIP) uninstall --yes $(PACKAGES); fi
	$(PIP) install -e '.[$(EXTRAS)]'
	@rm -f $(VENV)/.setup-* && echo $(BACKEND) > $(VENV)/.backend && touch $@

doctor: setup ## Check the installation and this machine.
	$(PY) -m onefold doctor

lint: setup ## Check style.
	$(VENV)/bin/ruff check

types: setup ## Check types.
	$(VENV)/bin/mypy

test: lint types ## Check style and types, then run the tests that do not take long, in JOBS processes (0: in one).
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not slow"

test-all: lint types ## The same with all tests, and every case where `make test` samples.
	ONEFOLD_TEST_ALL=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal

test-system: setup ## Run the tests that need programs which pip does not install; a missing program is a failure.
	ONEFOLD_TEST_SYSTEM=1 $(PY) -m pytest -q -m system

dist: setup ## Build the wheel and the sdist into dist.
	$(PY) -m build

demo: setup ## A server with a small real model, and agents that share a system prompt; ARGS=--keep leaves it, and its page, running.
	$(PY) -m onefold demo $(ARGS)

bench-core: setup ## Run the core benchmark.
	$(PY) benchmarks/core.py

bench-dropin: setup ## Run the drop-in benchmark: our prompt cache behind mlx-lm's server, and mlx-lm's own.
	$(PY) benchmarks/dropin.py

bench-serve: setup ## Run the serving benchmark: our server beside mlx-lm's, over HTTP.
	$(PY) benchmarks/serve.py

bench-latency: setup ## Measure who waits for whom: streams, a long prompt, newcomers, a large count_tokens.
	$(PY) benchmarks/latency.py

bench-disk: setup ## Run the disk benchmark: a restart against a cold prefill, and what writing costs.
	$(PY) benchmarks/disk.py

bench-remote: setup ## Run the benchmark of a shared store: a second server against a cold prefill, and what writing costs; needs redis-server.
	$(PY) benchmarks/remote.py $(ARGS)

bench-page: setup ## Measure what the page costs: how long a picture holds the lock, and the speed of answers with a viewer.
	$(PY) benchmarks/page.py $(ARGS)

bench-scale: setup ## Print when a shared store pays, and how many conversations one holds; computed, not measured.
	$(PY) benchmarks/scale.py $(ARGS)

bench-fleet: setup ## Simulate servers with and without a shared store on the requests of TRACE (docs/scale.md).
	$(PY) benchmarks/fleet.py $(TRACE) $(ARGS)

bench-turns: setup ## Run the benchmark of turns: what each writes to disk, and what can be resumed, by kind of model.
	$(PY) benchmarks/turns.py $(ARGS)

bench-kv: setup ## Measure what formats of stored KV cost in quality on the demo model; hours on a CPU, ARGS for fewer windows.
	$(PY) benchmarks/kv_quality.py $(ARGS)

bench-traces: setup ## Replay the requests of TRACE, a file that docs/eviction.md describes: what is found in the cache; ARGS for options.
	$(PY) benchmarks/traces.py $(TRACE) $(ARGS)

soak: setup ## Many clients on a tenth of the memory they need; every answer compared with a cold run.
	$(PY) benchmarks/soak.py

torture: setup ## Kill a process that serves and writes, 200 times: nothing acknowledged is lost, nothing wrong is reused.
	$(PY) benchmarks/torture.py

mac-check: setup ## The first hour on a Mac: check what docs/mac.md expects, and write one file; ARGS=--quick takes minutes.
	$(PY) benchmarks/mac_check.py $(ARGS)

mutants: setup ## Run the tests on 92 bugs that were put into the source, in JOBS processes: nine tenths must be noticed.
	$(PY) mutants/run.py --jobs $(JOBS)

schemas: setup ## Ask for answers to 1,040 schemas and validate them; hours with the demo model, ARGS=--walk takes minutes.
	$(PY) benchmarks/schemas.py $(ARGS)

problems: setup ## Run the problems benchmark.
	$(PY) benchmarks/problems.py

models: setup ## Try every architecture of mlx-lm and write docs/models.md.
	$(PY) benchmarks/models.py

clients: setup $(CLIENTS)/python/.installed $(CLIENTS)/npm/.installed ## Try clients of both APIs on the server, feature by feature; needs npm, and pip and npm fetch them.
	$(PY) clients/run.py $(ARGS)

agents: setup $(CLIENTS)/agents/.installed ## Run coding agents on the server: a tool call, a second turn, a resumed session; needs npm, which fetches them.
	$(PY) clients/agents/run.py $(ARGS)

$(CLIENTS)/python/.installed: clients/requirements.txt
	rm -rf $(@D) && $(PY) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	@touch $@

# No lock file: versions are exact, and a lock would name a registry.
$(CLIENTS)/npm/.installed: clients/package.json
$(CLIENTS)/agents/.installed: clients/agents/package.json
$(CLIENTS)/npm/.installed $(CLIENTS)/agents/.installed:
	@command -v npm >/dev/null || { echo "npm is needed: install Node.js" >&2; exit 1; }
	rm -rf $(@D) && mkdir -p $(@D) && cp $< $(@D)
	npm install --prefix $(@D) --no-package-lock --no-audit --no-fund --loglevel error
	@touch $@

clean: ## Remove .venv, .clients, caches and build products.
	rm -rf $(VENV) $(CLIENTS) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
