# `make demo` and `make test` set everything up by themselves; a second run re-uses what is there.
PYTHON ?= python3
CORES ?= 2
MEMORY_MB ?= 7700
GPUS ?= 1
CONFIG ?= config/config.yaml
BIN := .venv/bin
READY := .venv/.ready
# One run at a time, with a lock that goes with the process, however it ends; Snakemake's own would outlive a kill.
SNAKEMAKE = $(BIN)/python -m kvferry.alone .snakemake.lock $(BIN)/snakemake --nolock \
	--cores $(CORES) --resources mem_mb=$(MEMORY_MB) gpu=$(GPUS) --configfile $(CONFIG)

.PHONY: demo test lint setup report plan bench docs pictures clean

demo: setup
	@results=$$($(BIN)/python -m kvferry.config $(CONFIG)) && $(SNAKEMAKE) && cat $$results/headline.txt

report: setup
	@$(SNAKEMAKE) --report report.zip

plan: setup
	@$(BIN)/python -m kvferry.planner $(CONFIG)

bench: setup
	@test -t 2 || export TQDM_DISABLE=1; $(BIN)/python bench/fit.py && $(BIN)/python bench/apply.py && $(BIN)/python bench/evaluate.py

# The pages that are made from something else: the configuration reference and the picture of the rules.
docs: setup
	@$(BIN)/python -m kvferry.reference && $(BIN)/python docs/dag.py

# Small copies of the default run's figures, after `make demo`.
pictures: setup
	@$(BIN)/python docs/pictures.py figures

# Two files of tests at a time.
test: setup
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/snakefmt --check Snakefile workflow
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/snakemake --lint

setup: $(READY)

$(READY): pyproject.toml envs/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=…")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c envs/constraints.txt -e ".[workflow,dev]"
	@touch $(READY)

clean:
	rm -rf results/[!R]* figures/[!R]* logs benchmarks .snakemake
