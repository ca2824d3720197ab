# `make demo` and `make test` set up everything they need: an environment in .venv, with uv (fetched if missing).
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)
BIN := .venv/bin
.DEFAULT_GOAL := help
# Otherwise every process of every run would compile torch and all other packages again
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup demo compose-demo check test lint test-newest-flower proto requirements kit mutants histories docs docs-pages

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: .venv/.done ## create the environment (.venv) from requirements.txt, and install the commit hook

demo: setup ## run the demo: six clients, six domains, one round, one global model
	$(BIN)/osfl run configs/demo.toml

# docker-compose 1.29 or Compose v2, whichever is installed.
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

compose-demo: ## start the demo's federation in containers with TLS and node keys, run it and tear it down; the report is in runs/compose-demo
	trap '$(COMPOSE) -p osfl-demo down --volumes' EXIT; trap 'exit 130' INT TERM HUP; \
	$(COMPOSE) -p osfl-demo build && $(COMPOSE) -p osfl-demo up -d && \
	$(COMPOSE) -p osfl-demo run --rm run configs/demo.toml job-id=compose-demo && \
	$(COMPOSE) -p osfl-demo exec -T server osfl show /data/runs/compose-demo && \
	mkdir -p runs && docker cp $$($(COMPOSE) -p osfl-demo ps -q server):/data/runs/compose-demo runs/

check: lint ## run lint, types and the fast tests: about 3 minutes
	$(BIN)/pytest -m "not slow and not system"

# Real processes have deadlines that a busy machine may miss. A test fails if it also fails alone; both results are shown.
test: lint ## run everything: lint, types and all tests; a failed test is run once more, alone
	$(BIN)/pytest || { test $$? -eq 1 && echo "failed tests, once more and alone:" && $(BIN)/pytest --last-failed --numprocesses=0; }

NEWEST := .venv-newest-flower

test-newest-flower: | $(UV) ## test simulation and TLS nodes on the newest Flower, in a separate environment; optional, and may fail
	test -x $(NEWEST)/bin/python || $(UV) venv --quiet --python ">=3.11,<3.14" $(NEWEST)
	sed -E 's/"flwr(\[simulation\])?[<=>][^"]*"/"flwr\1"/' pyproject.toml > $(NEWEST)/pyproject.toml
	$(UV) pip install --quiet --upgrade --python $(NEWEST)/bin/python -r $(NEWEST)/pyproject.toml --all-extras
	$(UV) pip install --quiet --python $(NEWEST)/bin/python --no-deps --editable .
	$(NEWEST)/bin/python -m pytest -n 1 tests/system/test_simulation.py tests/system/test_deployment.py tests/system/test_proxy.py

lint: setup ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: setup ## generate osfl/payload/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. osfl/payload/v1/payload.proto

docs-pages: setup ## write what is generated from the code: docs/configuration.md, the settings of deploy/hub-app
	$(BIN)/python docs/generate.py

requirements: ## pin the newest compatible versions
	$(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --extra dev --no-emit-index-url --no-annotate --no-header pyproject.toml -o requirements.txt

SAMPLE ?= 100
MINUTES ?= 60
SEED ?= 0
JOBS ?= 2

FIRST ?= 0
COUNT ?= 1000
PARALLEL ?= 1
AGAIN ?=
TABLE ?=

histories: setup ## randomized fault injection into a real federation, with checks after each run: FIRST=0 COUNT=1000 PARALLEL=1 AGAIN= TABLE=
	$(BIN)/python -m benchmarks.tools.fault_injection $(FIRST) $(COUNT) --parallel $(PARALLEL) $(if $(AGAIN),--again) $(if $(TABLE),--table)

mutants: setup ## mutation testing of the unit tests: SAMPLE=100 mutants, drawn with SEED=0, started within MINUTES=60
	$(BIN)/python -m benchmarks.tools.mutants --sample $(SAMPLE) --minutes $(MINUTES) --seed $(SEED) --jobs $(JOBS)

docs: setup ## build the documentation into site/; a broken link fails
	$(UV) pip install --quiet --python $(BIN)/python -c requirements.txt -r pyproject.toml --extra docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

kit: setup ## train kits/digits again, into runs/kit
	$(BIN)/osfl kit train

# A worktree has the hooks of its checkout, an archive none; a machine's own hooks (core.hooksPath) stay
.venv/.done: requirements.txt pyproject.toml | $(UV)
	test -x $(BIN)/python || $(UV) venv --quiet --python ">=3.11,<3.14" .venv
	$(UV) pip sync --quiet --python $(BIN)/python requirements.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	test ! -d .git || $(BIN)/pre-commit install >/dev/null || echo "no commit hook installed"
	touch $@

.tools/bin/uv:
	python3 -m venv .tools
	.tools/bin/pip install --quiet --disable-pip-version-check uv
