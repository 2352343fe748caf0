# The checked configuration, places, and small helpers that several stages use.
import os
import re
import sys
from pathlib import Path

try:
    from kvferry import work
    from kvferry.config import load_project, read_yaml
    from kvferry.crosscheck import ROWS_WHEEL
    from kvferry.errors import KvferryError
    from kvferry.records import NATIVE, NATIVE_INJECTED, PERPLEXITY, ZERO_CACHE
    from kvferry.report.wanted import figures_of, tables_of
except ImportError:
    sys.exit(
        "the package kvferry is not installed here: run `make setup`, or `pip install -c envs/constraints.txt -e .[workflow]`"
    )

# Bars of libraries would fill the logs; our own are shown on a terminal all the same.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

BASE = Path(workflow.basedir)
CONFIG_FILES = [os.path.relpath(file) for file in workflow.configfiles] or [
    "config/config.yaml"
]

try:
    for file in CONFIG_FILES:
        read_yaml(Path(file))
    PROJECT = load_project(config, CONFIG_FILES[-1], BASE / "workflow" / "schemas")
except KvferryError as error:
    sys.exit(f"{error}")

config.update(PROJECT.config)
RESULTS = Path(config["results"])
FIGURES = Path(config["figures"])
WHEELS = Path(config["wheels"])
LOGS, TIMINGS = (Path(name, *RESULTS.parts[1:]) for name in ("logs", "benchmarks"))
# One GPU a job, where the config has jobs run on one; profiles cap how many are used at a time.
GPU = int(config["compute"]["device"].startswith("cuda"))
MOMENTS_MB = config["fit"]["memory_mb"] + 500
COMPUTE = {key: config["compute"][key] for key in ("device", "dtype")}
ENVIRONMENT = "../../envs/kvferry.yaml"
CONSTRAINTS = BASE / "envs" / "constraints.txt"
BENCHMARKS = list(config["evaluation"]["benchmarks"])
MODELS = PROJECT.models_of_run()
EVALUATED = BENCHMARKS + [PERPLEXITY]
TABLES = tables_of(PROJECT.config)
TARGETS = list(dict.fromkeys(PROJECT.pair(pair)["target"] for pair in config["pairs"]))
REPORT_CODE = [
    str(file.relative_to(BASE / "src" / "kvferry").with_suffix(""))
    for file in (BASE / "src" / "kvferry" / "report").rglob("*.py")
]


wildcard_constraints:
    model="[^/]+",
    pair="[^/]+",
    variant="[^/]+",
    corpus="[^/]+",


def code(*modules):
    """Modules of the package, as inputs: an edit of one makes the stages that use it run again."""
    return [BASE / "src" / "kvferry" / f"{module}.py" for module in modules] + [
        CONSTRAINTS
    ]


def entry(kind, name):
    """A registry's entry, as plain values that can be compared between runs."""
    return getattr(PROJECT, kind)[name]


def names(kind, *sorts):
    """Names in a registry whose entries are of the given sorts, as a pattern."""
    return (
        "|".join(n for n, e in getattr(PROJECT, kind).items() if e["kind"] in sorts)
        or "(?!)"
    )


def wheel_file(name):
    return WHEELS / f"{name}.whl"


def card(model):
    return RESULTS / "models" / model / "card.json"


def corpus_file(name):
    return RESULTS / "corpora" / f"{name}.jsonl"


def dump_of(model, corpus=config["calibration"]["corpus"]):
    return RESULTS / "kv" / model / corpus / "index.json"


def side(role):
    """An input function: the model of a pair in the given role, passed on to `place`."""
    return lambda place: lambda wildcards: place(PROJECT.pair(wildcards.pair)[role])


source, target = side("source"), side("target")


def pair_file(pair, name):
    return RESULTS / "pairs" / pair / name


def manifest(pair, variant):
    return pair_file(pair, f"mappers/{variant}/manifest.json")


def records(place, names):
    """Record paths by benchmark, under `results/records`."""
    return {name: RESULTS / "records" / place / f"{name}.json" for name in names}


def pair_records(pair, system, limits):
    """Record paths of a system of a pair by benchmark or measure."""
    return records(f"pairs/{pair}/{system}", work.measured(system, limits))


def rule_name(*parts):
    """A name that Snakemake takes, from a pair's or a model's."""
    return re.sub(r"\W", "_", "_".join(parts))


def all_tables():
    return expand(
        RESULTS / "tables" / "{table}.{kind}", table=TABLES, kind=["csv", "md", "tex"]
    )


def all_figures():
    return expand(
        FIGURES / "{figure}.{kind}",
        figure=figures_of(PROJECT.config),
        kind=["pdf", "png", "csv"],
    )


def native_records(model):
    """What a model answers on its own and, if it is a target, through its own cache."""
    systems = [NATIVE] + ([NATIVE_INJECTED] if model in TARGETS else [])
    return {system: records(f"{system}/{model}", EVALUATED) for system in systems}


def all_results():
    """Everything that tables read."""
    found = [card(model) for model in MODELS]
    for model in MODELS:
        for paths in native_records(model).values():
            found += paths.values()
    for pair in config["pairs"]:
        found += [
            manifest(pair, variant) for variant in work.variants_of(PROJECT, pair)
        ]
        for systems in work.evaluation_jobs(PROJECT, pair).values():
            for system, limits in systems.items():
                found += pair_records(pair, system, limits).values()
    return found
