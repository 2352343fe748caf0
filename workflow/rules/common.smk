# The checked configuration, places, and small helpers that several stages use.
import os
import sys
from pathlib import Path

try:
    from kvferry.config import load_project, read_yaml
    from kvferry.crosscheck import ROWS_WHEEL
    from kvferry.errors import KvferryError
    from kvferry.records import PERPLEXITY, ZERO_CACHE
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
COMPUTE = {key: config["compute"][key] for key in ("device", "dtype")}
ENVIRONMENT = "../../envs/kvferry.yaml"
CONSTRAINTS = BASE / "envs" / "constraints.txt"
BENCHMARKS = list(config["evaluation"]["benchmarks"])
MODELS = PROJECT.models_of_run()
EVALUATED = BENCHMARKS + [PERPLEXITY]
HEADLINE = config["headline"]
BESIDE = [variant for variant in config["variants"] if variant != HEADLINE] + [
    ZERO_CACHE
]
TABLES = [
    "table1_retention",
    "table10_pairs",
    "table11_benchmarks",
    "table12_size",
    "table13_accuracy",
    "table15_floor_normalised",
    "gap_recovered",
]
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


def dump_of(model):
    return RESULTS / "kv" / model / config["calibration"]["corpus"] / "index.json"


def side(role):
    """An input function: the model of a pair in the given role, passed on to `place`."""
    return lambda place: lambda wildcards: place(PROJECT.pair(wildcards.pair)[role])


source, target = side("source"), side("target")


def manifest(pair, variant):
    return RESULTS / "pairs" / pair / "mappers" / variant / "manifest.json"


def records(place, names):
    """Record paths by benchmark, under `results/records`."""
    return {name: RESULTS / "records" / place / f"{name}.json" for name in names}


def all_tables():
    return expand(
        RESULTS / "tables" / "{table}.{kind}", table=TABLES, kind=["csv", "md", "tex"]
    )


def all_figures():
    figures = [f"fig2_r2_heatmap_{pair}" for pair in config["pairs"]]
    if {"arc_challenge", "hellaswag", "mmlu"} & set(BENCHMARKS):
        figures.append("fig8_retention")
    return expand(
        FIGURES / "{figure}.{kind}", figure=figures, kind=["pdf", "png", "csv"]
    )


def all_results():
    """Everything that tables read."""
    native = [
        path
        for model in MODELS
        for path in records(f"native/{model}", EVALUATED).values()
    ]
    injected = [
        path
        for model in TARGETS
        for path in records(f"native_injected/{model}", EVALUATED).values()
    ]
    pairs = [
        path
        for pair in config["pairs"]
        for path in records(f"pairs/{pair}/{HEADLINE}", EVALUATED).values()
    ]
    beside = [
        records(f"pairs/{pair}/{name}", [PERPLEXITY])[PERPLEXITY]
        for pair in config["pairs"]
        for name in BESIDE
    ]
    cards = [card(model) for model in MODELS]
    manifests = [
        manifest(pair, variant)
        for pair in config["pairs"]
        for variant in config["variants"]
    ]
    return native + injected + pairs + beside + cards + manifests
