# Each target sets up what it needs: git, make, python >= 3.10 and pip are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# For CUDA: TORCH=torch, or install the build of your choice first. Which build a version is, the index
# says: on Linux the usual one has CUDA builds, with gigabytes of packages beside them. TORCH_INDEX=URL
# takes torch from another one, as of CPU builds; pytorch.org names them.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
STAMP := $(VENV)/.ready
LIBRARIES := $(VENV)/.integrations
ENGINES := $(VENV)-ray/.ready $(VENV)-sky/.ready
ENGINE_ray := ray[train]>=2.50
ENGINE_sky := skypilot>=0.14
BOOK := $(VENV)/.book
# Compiled files are kept, whatever the environment says (containers often say no): without them pytest rewrites
# all tests in each of its processes, and each process that a test starts compiles our modules.
export PYTHONDONTWRITEBYTECODE :=
# Tests run in two processes for each core, up to 8: half of them wait for processes or clocks.
SPREAD = -n $$($(BIN)/python -c 'import os; print(min(8, 2 * (os.cpu_count() or 1)))') --dist=worksteal
MUTANTS ?= 300
AT_LEAST ?= 0
SECONDS ?=
SEED ?= 1
# Which tests are in which tier: CONTRIBUTING.md.
QUICK := not (slow or nightly or browser or integration or engine or cuda)
ALL := not (nightly or integration or engine or cuda)
# Tracing lines doubles the time of Python code: it is kept off tests that run long, are about time, or run
# in processes of their own. `.venv/bin/coverage report -m` names the lines afterwards.
COVERAGE := --cov=diloco_protocol --cov=diloco_broker --cov=diloco_worker
COVERED := tests/protocol tests/broker tests/worker --ignore=tests/broker/shell

.PHONY: help setup demo chaos attack bench evidence lan sites fuzz test test-all test-browser test-integrations test-torch test-engines test-cuda test-nightly coverage slurm mutants nightly chromium lint format check docs picture release clean

help:
	@echo "make setup     create .venv with everything the other targets need"
	@echo "make demo      train a small GPT with one broker and two workers, compare with one worker alone"
	@echo "make chaos     kill, stop and cut off a run in every mode, then audit it: under 7 minutes"
	@echo "make attack    floods, forgeries and stolen keys against a broker that trains: what got through, what it cost"
	@echo "make bench     measure this machine's limits and the product against them: half an hour"
	@echo "make evidence  what is claimed of training, measured again: some two hours; goes on where it was stopped"
	@echo "make lan       syncs over lines of 1 Gb/s, 100 and 50 Mb/s in network namespaces: under 20 minutes, as root"
	@echo "make sites     two sites behind a slow line, with and without relays: some minutes, as root"
	@echo "make test      the quick tests: at most 5 minutes on two idle cores"
	@echo "make test-all  the slow ones and those in a browser, too: at most 13 minutes"
	@echo "make test-browser  the dashboard and reports in headless Chromium, which is installed where that may be"
	@echo "make test-integrations  with Hugging Face and Lightning, which are installed where that may be"
	@echo "make test-torch  the tests of tensor work without compiled kernels, by torch alone"
	@echo "make test-engines  a run on a real Slurm and a real Ray, which are installed where that may be"
	@echo "make test-cuda  on a CUDA device, where there is one, with a table of the seconds of a boundary (TORCH=torch)"
	@echo "make mutants   put 300 small faults into the core, one at a time: how many do the tests notice?"
	@echo "make nightly   what is too slow for each push: engines, simulated weeks, sabotage, mutants, chaos, long fuzzing"
	@echo "make coverage  how many lines the tests of the parts reach"
	@echo "make fuzz      inputs that may break something: a minute of them, or others: SECONDS=3600 SEED=7"
	@echo "make lint      ruff, mypy --strict, who imports whom, and pip-audit where it can look something up"
	@echo "make check     lint, fuzz and test-all: most of what CI runs (.ci/run)"
	@echo "make docs      the pages as one book in HTML, in site/; a link that leads nowhere fails it"
	@echo "make picture   draw docs/top.svg, the picture of diloco-top in README.md"
	@echo "make release   wheel and source archive of the last commit, made twice and compared, in dist/"
	@echo "make clean     remove .venv, the results of runs and the book"

$(STAMP): pyproject.toml Makefile hatch_build.py protocol/diloco_protocol/kernels/kernels.c
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once, a few minutes) ..."
	@# What a Python brings to a new environment is as old as that Python, and pip-audit looks at it, too.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip \
	  $$($(BIN)/python -c 'import importlib.util as u; print("setuptools" if u.find_spec("setuptools") else "")')
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

setup: $(STAMP)

demo: $(STAMP)
	@$(BIN)/diloco-demo

chaos: $(STAMP)
	@$(BIN)/python -m diloco_lab.chaos

attack: $(STAMP)
	@$(BIN)/python -m diloco_lab.chaos attack

bench: $(STAMP)
	@$(BIN)/python -m diloco_lab.bench all

evidence: $(STAMP)
	@$(BIN)/python -m diloco_lab.evidence all

# Without root there are no network namespaces: these two say so and succeed.
lan: $(STAMP)
	@$(BIN)/python -m diloco_lab.network lan --skip-is-success

sites: $(STAMP)
	@$(BIN)/python -m diloco_lab.network sites --skip-is-success

test: $(STAMP)
	@$(BIN)/python -m pytest $(SPREAD) -m "$(QUICK)"

test-all: $(STAMP)
	@$(BIN)/python -m pytest $(SPREAD) -m "$(ALL)"

# Properties get more examples than in the other tiers.
test-nightly: $(STAMP)
	@HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest $(SPREAD) --timeout 1200 -m "nightly or hypothesis"

coverage: $(STAMP)
	@$(BIN)/python -m pytest $(SPREAD) $(COVERAGE) -m "$(ALL)" $(COVERED)

# The tests skip themselves, with the reason, where there is no browser.
chromium:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  echo "Installing Chromium ..."; \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq >/dev/null && \
	    apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || echo "Chromium cannot be installed here (that takes root and apt): its tests will be skipped."; }

test-browser: $(STAMP) chromium
	@$(BIN)/python -m pytest -m browser -rs tests/tools/test_dashboard_browser.py tests/tools/test_report_browser.py

# The tests skip themselves, with the reason, where these cannot be had.
$(LIBRARIES): $(STAMP)
	@echo "Installing transformers, trl, peft, diffusers and lightning (once, some minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,integrations]" && touch $@ \
	  || echo "They cannot be installed here: tests of what is missing will be skipped."

test-integrations: $(LIBRARIES)
	@$(BIN)/python -m pytest $(SPREAD) -rs -m integration tests/integrations

test-torch: $(STAMP)
	@DILOCO_KERNELS=torch $(BIN)/python -m pytest $(SPREAD) -m "$(QUICK)" \
	  tests/protocol/tensors tests/broker/tensors tests/worker/model

# Engines pin much of what they need, so each has an environment of its own, over the packages of the other.
$(ENGINES): $(VENV)-%/.ready: $(STAMP)
	@echo "Installing $(ENGINE_$*) into $(VENV)-$* (once, a few minutes) ..."
	@$(BIN)/python -m venv $(VENV)-$*
	@$(BIN)/python -c 'import site; print("import site; site.addsitedir(\"" + site.getsitepackages()[0] + "\")")' \
	  > $$($(VENV)-$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth
	@$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check "$(ENGINE_$*)" && touch $@ \
	  || echo "$(ENGINE_$*) cannot be installed here: its tests will be skipped."

# A network with nothing but a loopback, where one can be made.
ALONE = $(shell unshare --net ip link set lo up 2>/dev/null && echo 'unshare --net sh -c "ip link set lo up && exec \"\$$@\"" sh')

slurm:
	@command -v slurmctld >/dev/null || { \
	  echo "Installing Slurm ..."; \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge iproute2 >/dev/null; } \
	  || echo "Slurm cannot be installed here (that takes root and apt): its tests will be skipped."; }

# The tests skip themselves, with the reason, where an engine cannot be had.
test-engines: $(ENGINES) slurm
	@$(BIN)/python -m pytest -rs -m engine tests/engines/test_slurm.py
	@test ! -e $(VENV)-ray/.ready || $(ALONE) $(VENV)-ray/bin/python -m pytest -rs -m engine tests/engines/test_ray.py
	@test ! -e $(VENV)-sky/.ready || $(VENV)-sky/bin/python -m pytest -rs -m engine tests/tools/test_launch_sky.py

# The tests skip themselves, with the reason, where there is no device.
test-cuda: $(STAMP)
	@$(BIN)/python -m pytest -rs -m cuda tests/gpu tests/worker/model
	@PYTHONPATH=tests $(BIN)/python -m gpu.table

mutants: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python -m mutation.drill --mutants $(MUTANTS) --at-least $(AT_LEAST)

# These on the command line override the ones here.
nightly: AT_LEAST := 0.5
nightly: SECONDS := 600
nightly: test-nightly test-engines mutants fuzz chaos coverage

fuzz: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(SECONDS),--seconds $(SECONDS)) --seed $(SEED)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python -m diloco_lab.release.vulnerabilities

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

check: lint fuzz test-all

$(BOOK): $(STAMP)
	@echo "Installing Sphinx (once, a minute) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,docs]"
	@touch $@

docs: $(BOOK)
	@$(BIN)/python -m diloco_lab.release.book

picture: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python -m kit.top_picture

release: $(STAMP)
	@$(BIN)/python -m diloco_lab.release.packages

clean:
	rm -rf $(VENV) $(VENV)-ray $(VENV)-sky runs site
