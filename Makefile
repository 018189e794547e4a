# Each target sets itself up on a fresh machine; `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.rerail-setup
ARGS ?=

.PHONY: help setup check format test test-slow test-crash test-s3 demo bench bench-checkpoint bench-detect bench-partitions soak clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   virtual environment in .venv, with rerail and its tools"
	@echo "make demo    four ranks train a small GPT while things break"
	@echo "make test    all tests"
	@echo "make test-slow  tests that take minutes each"
	@echo "make test-crash  saves killed at every system call, power cuts, full disks (minutes; as root on Linux)"
	@echo "make test-s3 checkpoints in an S3 store: a real client and server, on this machine"
	@echo "make check   ruff, mypy --strict, import layers, module sizes, fault catalogue"
	@echo "make format  let ruff fix and format"
	@echo "make bench   recovery benchmark (ARGS=--quick for a short one)"
	@echo "make bench-checkpoint  saving and loading beside fio and DCP (minutes, and 10 GB of disk)"
	@echo "make bench-detect  detection and diagnosis: latency, cost, throughput (four minutes)"
	@echo "make bench-partitions  a job of three nodes, parted 200 times (an hour; as root on Linux)"
	@echo "make soak    1,000 faults of all kinds in one job, also two at a time (hours; as root on Linux; ARGS='--faults 100 --seed 2')"
	@echo "make clean   remove caches and build output; .venv stays"

setup: $(STAMP)

# torch comes first and by itself: the wheel that the machine's pip settings prefer (a CPU build, say) then satisfies the pin.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "rerail needs Python 3.11 or newer: make setup PYTHON=python3.11" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py
	$(BIN)/python -m rerail.faults.check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Jobs of several nodes are tested in network namespaces; where those cannot be had, their tests say so and are skipped.
test: $(STAMP)
	@command -v ip >/dev/null || { apt-get update -qq && apt-get install -y -qq iproute2; } >/dev/null 2>&1 || true
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

test-slow: $(STAMP)
	$(BIN)/pytest -m slow $(ARGS)

# One process: the tests mount images and count system calls.
test-crash: $(STAMP)
	@command -v strace >/dev/null && command -v mkfs.xfs >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq strace xfsprogs; }
	$(BIN)/pytest tests/crash $(ARGS)

# The server has an environment of its own, and the client a folder: neither is part of rerail's.
test-s3: $(STAMP)
	@test -x .venv-s3/bin/moto_server || { $(PYTHON) -m venv .venv-s3 && .venv-s3/bin/pip install --quiet 'moto[server]>=5.2'; }
	@test -d build/s3/s3fs || $(BIN)/pip install --quiet --target build/s3 s3fs
	PYTHONPATH=build/s3 MOTO_SERVER=$(CURDIR)/.venv-s3/bin/moto_server $(BIN)/pytest tests/s3 $(ARGS)

demo: $(STAMP)
	@$(BIN)/rerail demo $(ARGS)

bench: $(STAMP)
	$(BIN)/python bench/recovery.py $(ARGS)

bench-checkpoint: $(STAMP)
	@command -v fio >/dev/null || apt-get install --yes --quiet fio
	$(BIN)/python bench/checkpoint.py $(ARGS)

bench-detect: $(STAMP)
	$(BIN)/python bench/detect.py $(ARGS)

bench-partitions: $(STAMP)
	@command -v ip >/dev/null || { apt-get update -qq && apt-get install -y -qq iproute2; }
	$(BIN)/python bench/partitions.py $(ARGS)

soak: $(STAMP)
	@command -v ip >/dev/null || { apt-get update -qq && apt-get install -y -qq iproute2; }
	$(BIN)/python bench/chaos.py $(ARGS)

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis bench/results
	find src tests bench examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +
