# Needs make and Python 3.11 or later (on Debian: apt install make python3-venv). Each target makes .venv itself.
PYTHON ?= python3
BIN := .venv/bin
MYPY = $(BIN)/mypy .types/dubito tests $(wildcard benchmarks) $(wildcard examples) docs/reference.py docs/dashboard.py docs/zoo.py
READY := .venv/.ready
NEED_DATA := caps fashion promises random_features rotated_mnist uci
NEED_FILES := cifar function_space_pictures gi_cifar gpu_chart law letters ood pruning reproduce rounding uci_elbo
NEED_EXTRAS := ray
BENCH ?= $(filter-out _% $(NEED_DATA) $(NEED_FILES) $(NEED_EXTRAS),$(basename $(notdir $(wildcard benchmarks/*.py))))
DATA ?= data
RULES ?= deploy/kubernetes/components/monitoring/rules.yaml

unexport PYTHONDONTWRITEBYTECODE # else each process that the tests start compiles all of dubito, and each worker all tests

.DEFAULT_GOAL := help
.PHONY: help setup serve wasm lint test test-slow test-soak bench zoo reference kubernetes lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

setup: $(READY) ## make .venv with dubito (editable) and the development tools

$(READY): pyproject.toml deploy/requirements-dev.lock
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { echo "no venv module: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --constraint deploy/requirements-dev.lock --editable '.[dev]'
	touch $@

wasm: service/console/wasm ## onnxruntime-web for the console's page /edge (needs npm)

service/console/wasm: deploy/edge/wasm.sh
	sh deploy/edge/wasm.sh $@ && touch $@ || echo "the page /edge will say what is missing"

serve: $(READY) wasm ## serve the embedded models with their console: make serve ARGS="model.safetensors --port 9000"
	$(BIN)/dubito serve $(ARGS)

lint: $(READY) ## ruff and strict mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(MYPY)

test: $(READY) wasm ## every test that takes seconds
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 -rs

test-slow: $(READY) ## the tests that take minutes, and more draws and examples of those that are made at random
	$(BIN)/python -m pip install --quiet --editable '.[ray]'
	TEST_EXAMPLES=5 $(BIN)/pytest -n 3 --dist loadfile -m 'slow or hypothesis or draws' --durations=10 \
		--ignore tests/deploy/test_ray.py
	$(BIN)/pytest -m slow tests/deploy/test_ray.py  # a cluster, which must not wait for processors

test-soak: $(READY) ## ten minutes each of load with mistakes, of attacks one at a time, and of two at a time
	$(BIN)/pytest -m soak --durations=10

bench: $(READY) ## every benchmark that needs no data, or one: make bench BENCH=fashion DATA=folder
	@set -e; for name in $(BENCH); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name \
		$$(case " $(NEED_DATA) " in *" $$name "*) echo --data-root '$(DATA)';; esac); done

zoo: $(READY) ## write the list of the zoo, its page and its cards from the artifacts: make zoo ARGS="--larger DIR"
	$(BIN)/python docs/zoo.py $(ARGS)

reference: $(READY) ## write the table of settings into docs/operations.md
	$(BIN)/python docs/reference.py

kubernetes: ## write the Prometheus operator's rules from deploy/prometheus
	@{ echo "# Written by \`make kubernetes\` from deploy/prometheus/rules.yml and alerts.yml."; \
	printf 'apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: dubito\nspec:\n  groups:\n'; \
	for file in rules alerts; do sed '1,/^groups:/d; s/^./  &/' deploy/prometheus/$$file.yml; done; } > '$(RULES)'

COMPILE = $(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --upgrade --quiet --no-header --no-annotate \
	--strip-extras --no-emit-index-url --no-emit-find-links --output-file

lock: $(READY) ## pin the versions that the image holds, and those of the development tools, for both kinds of machine
	$(COMPILE) deploy/requirements.lock --extra grpc --extra otel --extra remote
	grep --invert-match --extended-regexp '^(nvidia-|cuda-|triton==)' deploy/requirements.lock > deploy/requirements-cpu.lock
	$(COMPILE) deploy/requirements-dev.lock --extra dev

clean: ## remove .venv, builds and caches
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
