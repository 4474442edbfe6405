# `make run` starts the daemon, `make test` runs every test; both set up what they need in .venv first.
# PYTHON names the interpreter (3.11 or later) that .venv is made from.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
BIN := .venv/bin
WORKERS ?= 2

.DEFAULT_GOAL := help

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

.venv/.daemon: setup.cfg pyproject.toml
	@test -n "$(PYTHON)" || { echo "Sidegate needs Python 3.11 or later; name one with make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat -e '.[daemon]'
	@touch $@

.venv/.dev: .venv/.daemon
	$(BIN)/pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat -e '.[daemon,dev]'
	@touch $@

.PHONY: run
run: .venv/.daemon ## start the daemon (main job); Ctrl-C stops it
	@echo "In another terminal, try:  $(BIN)/sidegate hit requests_per_sec account:123 --limit 100 --per 1s"
	@exec $(BIN)/sidegate serve

.PHONY: test
test: .venv/.dev ## run every test, but for those of test-kubernetes
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not real_kubernetes'

.PHONY: kube
kube: .venv/.dev ## build a real kube-apiserver into your cache folder, once (6 minutes; needs Go)
	@$(BIN)/python -m tests.kube_build

.PHONY: test-kubernetes
test-kubernetes: kube ## run the tests that need a real kube-apiserver; they skip where it cannot be built
	$(BIN)/python -m pytest -m real_kubernetes -rs

PROTO := sidecar/gateway/proto/gubernator.proto cluster_link/discovery/proto/etcd.proto
protoc = $(BIN)/python -m grpc_tools.protoc -I . --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTO)

.PHONY: proto
proto: .venv/.dev ## make the code of the V1 API and of etcd's from their .proto
	$(call protoc,.)

.PHONY: check-proto
check-proto: .venv/.dev
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && $(call protoc,$$made) && \
	for file in $(foreach made,_pb2.py _pb2.pyi _pb2_grpc.py,$(PROTO:%.proto=%$(made))); do \
		cmp "$$made/$$file" "$$file" || { echo "$$file is not what its .proto makes: make proto" >&2; exit 1; }; done

.PHONY: check
check: .venv/.dev check-proto ## lint, types, import walls and what is made from the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports setup.cfg
	$(BIN)/python -m sidecar.manual | diff -u docs/configuration.md - || { echo "run make docs" >&2; exit 1; }

.PHONY: docs
docs: .venv/.dev ## write docs/configuration.md from the code
	$(BIN)/python -m sidecar.manual > docs/configuration.md

.PHONY: bench
bench: .venv/.dev ## measure against the targets (about two minutes, an idle machine)
	$(BIN)/python -m benchmarks

SIMULATE ?=
.PHONY: simulate
simulate: .venv/.bench ## clusters of 10 to 2,000 nodes on paper (four minutes; SIMULATE=--quick: seconds)
	$(BIN)/python -m benchmarks.simulate $(SIMULATE)

.venv/.bench: .venv/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat -e '.[daemon,dev,bench]'
	@touch $@

GUBERNATOR_VERSION ?= v2.13.0
GUBERNATOR_BIN = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sidegate/bin

.PHONY: gubernator
gubernator: ## build Gubernator to measure beside (needs Go; GUBERNATOR_VERSION=v2.13.0)
	@command -v go >/dev/null || { echo "Gubernator is built with Go, and there is no go; see https://go.dev/doc/install" >&2; exit 1; }
	@mkdir -p "$(GUBERNATOR_BIN)"
	@GOBIN="$(GUBERNATOR_BIN)" go install github.com/gubernator-io/gubernator/v2/cmd/gubernator@$(GUBERNATOR_VERSION) || { \
		echo "Gubernator $(GUBERNATOR_VERSION) does not build here; name another with GUBERNATOR_VERSION=, or leave it out: make bench-peers PEERS='--contenders sidegate,redis-fixed,...'" >&2; exit 1; }

.PHONY: bench-peers
bench-peers: .venv/.bench ## measure beside Gubernator and Redis (half an hour, an idle machine; PEERS='--quick')
	$(BIN)/python -m benchmarks.peers $(PEERS)

.PHONY: fuzz
fuzz: .venv/.dev ## malformed input for ten minutes (SECONDS_TO_FUZZ=600)
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS_TO_FUZZ),600)

.PHONY: format
format: .venv/.dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: clean
clean: ## remove what make made
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
