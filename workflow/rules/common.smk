# The checked configuration, places, and small helpers that several stages use.
import os
import re
import sys
from pathlib import Path

try:
    from kvferry import asked, memory, work
    from kvferry.config import load_project, read_yaml
    from kvferry.crosscheck import ROWS_WHEEL
    from kvferry.devices import DEVICE, SOURCE, TARGET, first_of, gpus_of
    from kvferry.errors import KvferryError
    from kvferry.records import COQA, IDENTITY, LATENCY, NATIVE
    from kvferry.records import NATIVE_TOKENS, NATIVE_TOKENS_TIME, ZERO_CACHE
    from kvferry.report.places import SUMMARY, category, labels
    from kvferry.report.wanted import figures_of, tables_of
except ImportError:
    sys.exit(
        "the package kvferry is not installed here: run `make setup`, or `pip install -c envs/constraints.txt -e .[workflow]`"
    )

# Bars of libraries would fill the logs; our own are shown on a terminal all the same.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Jobs keep the memory of an array for the next one. By itself glibc returns it to the kernel, which then clears every page of
# the next array: a fifth of the time of a fit.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**32))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TOP_PAD_", str(2**26))

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
COMPUTE = {key: value for key, value in config["compute"].items() if key != "threads"}
FIT_DEVICE = first_of(COMPUTE)
# GPUs of a job with one model, with both models of a pair, and with none; profiles cap how many are used at a time.
GPU, PAIR_GPU = gpus_of(COMPUTE, [DEVICE]), gpus_of(COMPUTE, [SOURCE, TARGET])
FIT_GPU = int(FIT_DEVICE != "cpu")
# Minutes that a job of a stage may take on a cluster. Stages that take most go on where a job was stopped.
MINUTES = {"prepare": 60, "dump": 240, "fit": 480, "evaluate": 480, "report": 60}
ENVIRONMENT = "../../envs/kvferry.yaml"
CONSTRAINTS = BASE / "envs" / "constraints.txt"
MODELS = PROJECT.models_of_run()
TABLES = tables_of(PROJECT.config)
REPORT_CODE = [
    str(file.relative_to(BASE / "src" / "kvferry").with_suffix(""))
    for file in (BASE / "src" / "kvferry" / "report").rglob("*.py")
]


wildcard_constraints:
    model="[^/]+",
    pair="[^/]+",
    variant="[^/]+",
    corpus="[^/]+",


def said(message):
    """What is printed of a job that runs, a line; a dry run tells its files and resources instead."""
    return None if workflow.output_settings.dryrun else message


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


def needing(estimate):
    """The memory of a job in MB, or a function that gives it, as a resource: more of it at every attempt."""
    return lambda wildcards, attempt: memory.at_attempt(
        estimate(wildcards) if callable(estimate) else estimate, attempt
    )


def models_of(pair):
    """Both models of a pair by role."""
    return {
        role: PROJECT.pair(pair)[name]
        for role, name in ((SOURCE, "source"), (TARGET, "target"))
    }


def recipes(pair, variants):
    return [PROJECT.recipe(pair, name) for name in variants]


def side(role):
    """An input function: the model of a pair in the given role, passed on to `place`."""
    return lambda place: lambda wildcards: place(PROJECT.pair(wildcards.pair)[role])


source, target = side("source"), side("target")


def pair_file(pair, name):
    return RESULTS / "pairs" / pair / name


def manifest(pair, variant):
    return pair_file(pair, f"mappers/{variant}/manifest.json")


def identity_manifest(model):
    """Of the model's mapper to itself."""
    return RESULTS / "identity" / model / "manifest.json"


def of_pair(pair):
    """Where the records of a system of a pair lie."""
    return lambda system: f"pairs/{pair}/{system}"


def of_model(model):
    """Where the records of a model on its own, or of its control, lie."""
    return lambda system: f"{system}/{model}"


def record(place, name):
    """A record of a benchmark or measure."""
    return RESULTS / "records" / place / f"{name}.json"


def shard_of(place, name, shard):
    """The record of a part of a benchmark's items; shard: number from 0 and count."""
    return (
        RESULTS / "records" / place / "shards" / name / f"{shard[0]}-of-{shard[1]}.json"
    )


def mappers_of(pair, systems):
    """The variant whose mapper a system of a pair uses: the headline for the controls made from it, none for zeros."""
    headline = PROJECT.headline(pair)
    used = {
        system: headline if system in asked.CONTROLS else system for system in systems
    }
    return used | {system: None for system in systems if system == ZERO_CACHE}


def mapped_by(pair, job):
    """The variants whose mappers a job reads, each once."""
    return list(dict.fromkeys(filter(None, mappers_of(pair, job.limits).values())))


def native_heads(pair, systems):
    """How many first tokens the target reads itself, by system."""
    return {
        system: PROJECT.variant(variant)["native_head"] if variant else 0
        for system, variant in mappers_of(pair, systems).items()
    }


def minutes(stage):
    """The time that a cluster is asked for: MINUTES at the first try, as much again at each further one."""
    return lambda wildcards, attempt: attempt * MINUTES[stage]


def rule_name(*parts):
    """A name that Snakemake takes, from a pair's or a model's."""
    return re.sub(r"\W", "_", "_".join(parts))


def all_tables():
    return expand(
        RESULTS / "tables" / "{table}.{kind}", table=TABLES, kind=["csv", "md", "tex"]
    )


def all_verdicts():
    return expand(RESULTS / "verdict" / "{pair}.md", pair=config["pairs"])


def all_figures():
    return expand(
        FIGURES / "{figure}.{kind}",
        figure=figures_of(PROJECT.config),
        kind=["pdf", "png", "csv"],
    )


def places():
    """(jobs, place) of every pair and model: what is asked of their systems, and where a system's records lie."""
    of_models = [(asked.native_jobs(PROJECT, m), of_model(m)) for m in MODELS]
    return of_models + [
        (asked.evaluation_jobs(PROJECT, p), of_pair(p)) for p in config["pairs"]
    ]


def all_sharded():
    """(place, benchmark, number of shards) of every record that is merged."""
    return [
        (place(system), name, count)
        for jobs, place in places()
        for (system, name), count in asked.sharded(jobs).items()
    ]


def all_records():
    """Every record that tables read."""
    of_pairs = {p: asked.records_of_pair(PROJECT, p) for p in config["pairs"]}
    of_models = {m: asked.records_of_model(PROJECT, m) for m in MODELS}
    found = [(of_pair(p), own) for p, own in of_pairs.items()]
    found += [(of_model(m), own) for m, own in of_models.items()]
    return [
        record(place(system), name)
        for place, systems in found
        for system, names in systems.items()
        for name in names
    ]


def all_results():
    """Everything that tables read."""
    manifests = [
        manifest(pair, variant)
        for pair in config["pairs"]
        for variant in work.variants_of(PROJECT, pair)
    ]
    return [card(model) for model in MODELS] + manifests + all_records()
