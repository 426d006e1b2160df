# Every target prepares what it needs by itself; afterwards that costs a twentieth of a second.
# Needed beforehand: git, make, Python 3.11 or newer.
PYTHON ?= python3
# As in scripts/bootstrap.py: a .venv that make has not made is the user's.
VENV := $(if $(wildcard .venv),$(if $(wildcard .venv/.made-by-make .venv/.ready-*),.venv,build/venv),.venv)
BIN := $(VENV)/bin
CASES ?= 50000
JOBS ?= 3
SEED ?=
TIME ?= 600
QUICK := $(addprefix tests/,wire states datapath rendezvous/links failover rnic)

# The tests start hundreds of processes.  Without cached bytecode each one compiles the package again,
# which doubles the processor time of its start; `make clean` removes the cache.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo example quick test test-long where test-compiled pythons prometheus programs wheels interop conform conform-mutants lint types bench states rooms ladders cli-page compliance campaigns soak docs docs-check figures performance clean \
    ready-bench ready-cli ready-dev ready-docs ready-long ready-browser

help:
	@echo 'make demo       two programs of README, a file, processor time: SMC-R and TCP'
	@echo 'make example    other programs on top: NAME=tls, web, websocket or anyio_echo'
	@echo 'make quick      the tests of protocol and data path, without processes: under a minute'
	@echo 'make test       all tests but benchmarks and long ones: at most six minutes on an idle machine with two cores'
	@echo 'make test-long  the long tests: thousands of connections, a soak, suites of other projects'
	@echo 'make where      names the tests of a module: make where trio_smc/rnic/pump.py'
	@echo 'make pythons    the tests on every Python of this machine; ARGS=--debian13 in a root of that, too; --debian SUITE'
	@echo 'make prometheus a real Prometheus scrapes the exporter, and promtool checks the examples'
	@echo 'make programs   programs of other projects, unmodified: FastAPI, MCP, purerpc, Postgres, Chromium'
	@echo 'make test-compiled the tests on a build whose hot modules are compiled'
	@echo 'make wheels     what is published, in dist: sdist, pure wheel, compiled wheels, all tried'
	@echo 'make interop    the Linux kernel as peer, in QEMU guests: about twenty minutes, Debian only'
	@echo 'make bench      compare with TCP under Trio and others; ARGS=--short, --programs, --comparison or --proxy'
	@echo 'make conform    judge trio_smc by its conformance suite, as server and client: a minute'
	@echo 'make conform-mutants  trio_smc with one fault each: the suite must notice every one'
	@echo 'make lint       ruff, the import rules between rooms, counts that may only fall'
	@echo 'make types      mypy --strict'
	@echo 'make states     write the state diagrams and tables into docs/states'
	@echo 'make rooms      write the table and the drawing of rooms in CONTRIBUTING.md'
	@echo 'make ladders    draw the ladder diagrams of docs/capture.md'
	@echo 'make compliance write which tests hold what the RFC demands; ARGS=--check'
	@echo 'make docs       build the pages into build/docs'
	@echo 'make docs-check build them and check each in a browser: links, pictures, size and contrast of text'
	@echo 'make campaigns  random bad input, CASES=50000 each, SEED=n to replay'
	@echo 'make soak       TIME=600 seconds of kill -9, SIGSTOP and failing RNICs; SEED=n to replay'
	@echo 'make clean      remove the .venv that make has made, and everything built'

ready-bench:
	@$(PYTHON) scripts/bootstrap.py bench

ready-cli:
	@$(PYTHON) scripts/bootstrap.py cli

ready-dev:
	@$(PYTHON) scripts/bootstrap.py dev

ready-docs:
	@$(PYTHON) scripts/bootstrap.py dev dot ip nft redis-server tshark

ready-long:
	@$(PYTHON) scripts/bootstrap.py dev dot ip nft redis-server tshark aarch64-linux-gnu-gcc

ready-browser:
	@$(PYTHON) scripts/bootstrap.py dev dot chromium

demo: ready-cli
	@$(BIN)/python -m examples.demo $(ARGS)

example: ready-dev
	@$(BIN)/python -m examples.$(or $(NAME),web) $(ARGS)

quick: ready-docs
	@$(BIN)/python -m pytest -q -n $(JOBS) -m "not processes" $(QUICK) $(ARGS)

test: ready-docs
	@$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

# The pages are tested by `make docs-check`, and by `.ci/run` as a newcomer follows them.
test-long: ready-long
	@$(BIN)/python -m pytest -n $(JOBS) --full -m full --ignore=tests/docs $(ARGS)

# `make where FILE` as well: what follows `where` is a module and not a goal.
MODULES := $(if $(filter where,$(firstword $(MAKECMDGOALS))),$(wordlist 2,99,$(MAKECMDGOALS)))
.PHONY: $(MODULES)
$(MODULES): ; @:

where: ready-dev
	@$(BIN)/python -m scripts.where $(or $(FILE) $(MODULES),--help)

test-compiled: ready-docs
	@$(BIN)/python -m scripts.wheels --test -n $(JOBS) $(ARGS)

pythons:
	@$(PYTHON) -m scripts.pythons $(ARGS)

prometheus:
	@$(PYTHON) scripts/bootstrap.py dev prometheus
	@$(BIN)/python -m pytest --full tests/tools/test_exporter.py $(ARGS)

programs: ready-browser
	@$(BIN)/python -m pytest --full -m others tests/programs $(ARGS)

wheels:
	@$(PYTHON) -m scripts.wheels $(ARGS)

interop: ready-dev
	@$(BIN)/python -m tests.lab.setup
	@$(BIN)/python -m pytest --full -m lab tests/lab $(ARGS)

bench: ready-bench
	@$(BIN)/python -m benchmarks $(ARGS)

conform: ready-dev
	@$(BIN)/python -m scripts.conform $(ARGS)

conform-mutants: ready-dev
	@$(BIN)/python -m scripts.conform_mutants $(ARGS)

lint: ready-dev
	@failed=0; $(BIN)/ruff check . || failed=1; \
	    $(BIN)/lint-imports --no-cache || failed=1; \
	    $(BIN)/python -m scripts.ratchets || failed=1; exit $$failed

types: ready-dev
	@$(BIN)/mypy

states: ready-docs
	@$(BIN)/python -m scripts.states $(ARGS)

rooms: ready-docs
	@$(BIN)/python -m scripts.rooms $(ARGS)

ladders: ready-docs
	@$(BIN)/python -m scripts.ladders $(ARGS)

cli-page: ready-dev
	@$(BIN)/python -m scripts.cli_page $(ARGS)
	@$(BIN)/python -m scripts.shell_files $(ARGS)

compliance: ready-dev
	@$(BIN)/python -m scripts.compliance $(ARGS)

campaigns: ready-dev
	@$(BIN)/python -m scripts.campaigns --cases $(CASES) $(if $(SEED),--seed $(SEED))

soak: ready-dev
	@$(BIN)/python -m scripts.soak --time $(TIME) $(if $(SEED),--seed $(SEED))

performance: ready-docs
	@$(BIN)/python -m scripts.performance_page $(ARGS)

figures: ready-docs
	@for each in docs/figures/*.dot; do dot -Tsvg -o $${each%.dot}.svg $$each || exit 1; done

docs: ready-docs
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs $(ARGS)
	@echo 'open build/docs/index.html'

docs-check: ready-browser docs
	@$(BIN)/python -m scripts.check_docs build/docs $(if $(SHOTS),--screenshots $(SHOTS))

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache \
	    .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
