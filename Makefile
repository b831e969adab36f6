# Everything starts from `make help`. PYTHON is only used to make the environment; after that .venv does the work.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
LOCK ?= requirements-dev.lock
# Two marks in the environment: what LOCK names is installed; at least what training needs is installed.
STAMP := $(VENV)/.installed
TRAINS := $(VENV)/.trains
# More workers than the usual two cores: a test of a cluster waits more than it computes, a unit test a little.
JOBS ?= 4
# The development environment with CUDA. Its packages are of the versions of the other locks.
CUDA_VENV := .venv-cuda
CUDA ?= cuda12
CUDA_PYTHON := $(CUDA_VENV)/bin/python
PEERS := .venv-bench
PEERS_STAMP := $(PEERS)/.installed
# For the oldest Python: what it can have, the others can have too.
RESOLVE = $(BIN)/uv pip compile pyproject.toml --quiet --python-version=3.11 --python-platform=linux \
	--generate-hashes --no-header --no-annotate
# What the development environment has of the optional dependencies: all but ray, which has its own.
EXTRAS := build cartpole dev digits docs mnist models prometheus safetensors tensorboard test
TRAIN_EXTRAS := --extra=mnist --extra=digits --extra=prometheus --extra=tensorboard --extra=build
LOGDIR ?= runs
# The rooms whose code meets an accelerator.
STAND_INS := checkpoint graph kernels session state task
PYTEST = $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=worksteal
# What the source itself promises is the same with every version of a package.
OF_SOURCE := style house layers public_names time_limits
# Each run has a directory of its own; make mnist RUN=NAME goes on with one that is there.
RUN ?= mnist-$(shell date +%Y%m%d-%H%M%S)

export PYTHONUNBUFFERED := 1
# Tests are compiled once, not in each run and each of its processes.
unexport PYTHONDONTWRITEBYTECODE
export RUNS SEED

.DEFAULT_GOAL := help
.PHONY: help setup mnist cartpole recommender test test-busy test-unit test-stand-ins test-rest test-nightly test-gpu test-h100-compile test-all test-lowest test-newest test-ray chaos endings fuzz bench bench-quick bench-gpu bench-setup cuda-setup lint format tf1-oracle tf1-drawn proto docs dist lock audit tensorboard clean

help: ## Show this list.
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-17s %s\n", $$1, $$2 }'

setup: $(STAMP) ## Make .venv from requirements-dev.lock (only when that or pyproject.toml changed).

# Another interpreter has an environment of its own: make test-unit PYTHON=python3.13 VENV=.venv-3.13
$(STAMP): $(LOCK) pyproject.toml
	$(call install,$(LOCK),$(if $(findstring cuda,$(LOCK)),6.0,1.4) GB in all and some minutes)
	@touch $@ $(TRAINS)

# What training needs is in every other lock too, so an environment for tests trains; and make test adds to this one.
$(TRAINS): requirements.lock pyproject.toml
	$(call install,requirements.lock,0.9 GB and a minute)
	@touch $@

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than Python 3.11: pass a newer one, as in make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the packages of $(1) into $(VENV): $(2), the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r $(1)
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
endef

mnist: $(TRAINS) ## Train MNIST on a local cluster of 1 ps and 2 workers; ends with the test accuracy.
	$(BIN)/python -m models.mnist.data
	$(BIN)/python -m harness.launch --ps=1 --workers=2 -- \
		$(BIN)/python -m models.mnist.trainer --flagfile=configs/mnist_async.flags --logdir=$(LOGDIR)/$(RUN)

cartpole: $(STAMP) ## Learn CartPole with 1 ps and 2 actor-critic workers; ends with the mean score, 500 at the most.
	$(BIN)/python -m harness.launch --ps=1 --workers=2 -- \
		$(BIN)/python -m models.cartpole.trainer --logdir=$(LOGDIR)/$(RUN:mnist-%=cartpole-%)

recommender: $(STAMP) ## Learn which films people like with tables on 1 ps, and 2 workers; prints recall@10, AUC and nearest films.
	$(BIN)/python -m models.recommender.data
	$(BIN)/python -m harness.launch --ps=1 --workers=2 -- \
		$(BIN)/python -m models.recommender.trainer --logdir=$(LOGDIR)/$(RUN:mnist-%=recommender-%)

# Most of what tests compile runs once: optimising it would take longer. test-rest and all examples compile as users do.
test test-stand-ins test-unit: export JAX_DISABLE_MOST_OPTIMIZATIONS = 1
test test-stand-ins test-unit: export XLA_FLAGS = --xla_cpu_use_fusion_emitters=false
test: $(STAMP) ## Run the tests but the longest, in six minutes or so on two cores; one file: make test TESTS=tests/harness/launch/test_launch.py
	$(PYTEST) -m "not (chaos or gpu or nightly)" $(TESTS)
	$(if $(TESTS),,@$(MAKE) --no-print-directory test-stand-ins)

# What fails beside them fails on a busy machine: a defect of the test or of the product.
test-busy: $(STAMP) ## Run make test beside two busy loops, one for each of the usual two cores; TESTS as for make test.
	@for loop in 1 2; do (while :; do :; done) & loops="$$loops $$!"; done; trap "kill $$loops" EXIT; \
		$(MAKE) --no-print-directory test

test-stand-ins: $(STAMP) ## Run the quick tests of what a worker computes, with stand-in GPUs; make test ends with them.
	$(PYTEST) -p tests.kit.stand_in_gpus -m unit $(STAND_INS:%=tests/runtime/%) tests/harness/tf1/graph/test_devices.py

test-unit: JOBS = 3
test-unit: $(STAMP) ## Run the quick tests, which start no process, in about a minute.
	$(PYTEST) -m unit $(TESTS)

test-rest: $(STAMP) ## Run what make test leaves out: the longest.
	$(PYTEST) -m chaos $(TESTS)

test-nightly: $(STAMP) ## Run the tests that .ci/run leaves out: jobs of Kubernetes in pods of namespaces, and what takes minutes; where make cuda-setup was run, test-h100-compile too.
	$(PYTEST) -m nightly $(TESTS)
	$(if $(TESTS),,$(if $(wildcard $(CUDA_PYTHON)),@$(MAKE) --no-print-directory test-h100-compile))

test-gpu: export JAX_PLATFORMS = cuda,cpu
test-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE = false
test-gpu: export JAX_DEFAULT_MATMUL_PRECISION = highest
test-gpu: cuda-setup ## Run the tests of a GPU, and what a worker computes on it; skipped, with the reason, without a card.
	$(CUDA_PYTHON) -m pytest -m gpu tests/gpu
	$(if $(wildcard /dev/nvidiactl),$(CUDA_PYTHON) -m pytest -n $(JOBS) -m unit $(STAND_INS:%=tests/runtime/%))

test-h100-compile: cuda-setup ## Compile models, examples and tutorials for an H100, without a card, in some minutes.
	$(CUDA_PYTHON) -m pytest -rP -m nightly tests/gpu

test-all: $(STAMP) ## Run all tests; HYPOTHESIS_PROFILE=ci for more examples of properties (dev: 20, ci: 100, nightly: 2000).
	$(PYTEST) $(TESTS)

test-lowest: ## make test-unit and mnist with the lowest versions of all dependencies that pyproject.toml allows.
	$(MAKE) --no-print-directory test-unit mnist VENV=.venv-lowest LOCK=requirements-lowest.lock \
		TESTS="tests $(OF_SOURCE:%=--ignore=tests/test_%.py)"

test-newest: ## make test-unit and mnist with the newest versions of all dependencies; they need Python 3.12: PYTHON=python3.13.
	$(MAKE) --no-print-directory test-unit mnist VENV=.venv-newest LOCK=requirements-newest.lock XLA_FLAGS= \
		TESTS="tests $(OF_SOURCE:%=--ignore=tests/test_%.py)"

test-ray: ## Run the tests of harness.ray with PyPI's ray, in .venv-ray, in some minutes.
	$(MAKE) --no-print-directory test-all VENV=.venv-ray LOCK=requirements-ray.lock TESTS=tests/harness/ray JOBS=2

chaos: $(STAMP) ## Train MNIST under random kills, freezes and cuts, and add up; CHAOS_SECS=60 for a short one.
	$(BIN)/python -m benchmarks.chaos

endings: $(STAMP) ## Random histories of how runs end, with kills and freezes; RUNS=50, SEED=1 for one again.
	$(BIN)/python -m benchmarks.endings

fuzz: $(STAMP) ## What may come from elsewhere, made up and damaged: an error, never the end of a task; KIND=frames N=1000, SEED=1.
	$(BIN)/python -m tests.fuzz $(or $(KIND),all) $(or $(N),0) $(or $(SEED),0)

bench: $(STAMP) $(PEERS_STAMP) ## Steps per second beside TensorFlow, PyTorch and plain JAX; writes benchmarks/results.
	$(BIN)/python -m benchmarks.table

bench-quick: $(STAMP) ## Whether a step has become slower: ours beside plain JAX, under a minute.
	$(BIN)/python -m benchmarks.quick

bench-gpu: cuda-setup ## Copies and steps of a worker with a GPU; writes benchmarks/results/gpu.json.
	$(CUDA_PYTHON) -m benchmarks.gpu

cuda-setup: ## Make .venv-cuda, the development environment with CUDA: 6.3 GB; CUDA=cuda13 for Blackwell and later.
	$(MAKE) --no-print-directory setup VENV=$(CUDA_VENV)
	$(CUDA_PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-$(CUDA).lock

bench-setup: $(PEERS_STAMP) ## Make .venv-bench with the peers of make bench: TensorFlow and PyTorch, some GB.

$(PEERS_STAMP): benchmarks/requirements-peers.lock
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

lint: $(STAMP) ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Put imports and layout in order.
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

tf1-oracle: $(PEERS_STAMP) ## Write down anew what TensorFlow gives for the cases that harness.tf1 is compared with.
	$(PEERS)/bin/python -m tests.harness.tf1.oracle.record tests/harness/tf1/oracle/tensorflow_2_21.json
	$(PEERS)/bin/python -m tests.harness.tf1.oracle.inputs tests/harness/tf1/oracle/inputs_2_21.json
	$(PEERS)/bin/python -m tests.harness.tf1.oracle.running record 120 tests/harness/tf1/oracle/drawn_2_21.json

tf1-drawn: $(STAMP) $(PEERS_STAMP) ## Draw small TF1 programs that run in TensorFlow and in harness.tf1, and show where they differ; N=2000, SEED=0.
	$(BIN)/python -m tests.harness.tf1.oracle.running $(or $(N),2000) $(or $(SEED),0) $(PEERS)/bin/python

docs: $(STAMP) ## Make the documentation site, build/docs/site/index.html, with a reference of all public names.
	$(BIN)/python docs/site.py

dist: $(STAMP) ## Build what is uploaded to a package index, for a repository at URL; the README's links become addresses.
	$(BIN)/python docs/dist.py --url=$(URL)

lock: $(STAMP) ## Pin what pyproject.toml asks for, with hashes, keeping the pins that do; UPGRADE=--upgrade for the newest.
	$(RESOLVE) $(UPGRADE) $(EXTRAS:%=--extra=%) --output-file=requirements-dev.lock
	$(RESOLVE) $(TRAIN_EXTRAS) --constraint=requirements-dev.lock --output-file=requirements.lock
	$(RESOLVE) $(UPGRADE) $(TRAIN_EXTRAS) --extra=cuda12 --constraint=requirements-dev.lock --output-file=requirements-cuda12.lock
	$(RESOLVE) $(UPGRADE) $(TRAIN_EXTRAS) --extra=cuda13 --constraint=requirements-dev.lock --output-file=requirements-cuda13.lock
	$(RESOLVE) $(UPGRADE) --extra=build --extra=digits --extra=mnist --extra=prometheus --extra=ray --extra=test \
		--constraint=requirements-dev.lock --output-file=requirements-ray.lock
	@# Newer versions of JAX ask for a newer Python than the oldest that can train.
	$(subst =3.11,=3.13,$(RESOLVE)) --upgrade $(EXTRAS:%=--extra=%) --output-file=requirements-newest.lock
	$(BIN)/uv pip compile requirements-lowest.lock --quiet --no-header --no-annotate --no-deps --generate-hashes \
		--output-file=requirements-lowest.lock

audit: $(STAMP) ## Look for known vulnerabilities in what is installed to train; asks pypi.org.
	$(BIN)/uv tool run pip-audit --strict --disable-pip --require-hashes --requirement=requirements.lock

proto: $(STAMP) ## Generate runtime/proto from protos/.
	$(BIN)/python protos/generate.py

tensorboard: $(TRAINS) ## Show the training runs under LOGDIR (runs).
	$(BIN)/tensorboard --logdir=$(LOGDIR)

clean: ## Remove caches and build outputs; .venv and runs stay.
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
