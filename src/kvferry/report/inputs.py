"""Everything that tables and figures are made from, gathered from disk into one object.

Knows where the workflow puts records, cards and manifests. Does not know statistics or how a table looks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kvferry.asked import dialogue_variants, records_of_model, records_of_pair
from kvferry.config import Project
from kvferry.errors import KvferryError
from kvferry.files import read_json
from kvferry.records import NATIVE, PERPLEXITY, ZERO_CACHE, Record, read_record
from kvferry.report.paper import FIVE, PAPER_ROOT, Paper
from kvferry.report.papers_recipe import RIDGE, STRIPPED, is_papers
from kvferry.report.wanted import HELD_OUT, SHOWN_APART, tables_of
from kvferry.work import variants_of

SOURCE = "source alone"
CARD_FIELDS = ("parameters", "layers", "kv_heads", "head_dim")
MANIFEST_FIELDS = (
    "recipe",
    "selected_layers",
    "parameters",
    "weights_bytes",
    "rows",
    "features",
    "r2",
    "held_out_rows",
)
PROBE_COLUMNS = ("kind", "source_layer", "target_layer", "r2", "n", "p")
GREEDY_COLUMNS = ("kind", "target_layer", "head", "step", "source_layer", "r2", "r2_all", "n", "p_all")


@dataclass(frozen=True)
class Pair:
    """An ordered pair of models; `paper` is its name in the paper, if it is there."""

    name: str
    source: str
    target: str
    paper: str | None = None


@dataclass(frozen=True)
class Sweep:
    """Variants that are compared with each other: on these pairs and, beside the measures of the next token, these benchmarks."""

    name: str
    pairs: Sequence[str]
    variants: Sequence[str]
    benchmarks: Sequence[str]


@dataclass(frozen=True, eq=False)
class Results:
    """What one configuration produced.

    `native` is keyed by (model, benchmark or measure), `injected`, the controls of a target alone, by (system, model, benchmark
    or measure), `transfers` by (pair, system, benchmark or measure), `manifests` by (pair, variant), `cards` by model, `sweeps`
    by name, `headlines` (the variant that answers all benchmarks) and `dialogues` (variants that went on with conversations) by
    pair. `benchmarks` are those of the paper's five that were run, `held_out_benchmarks` those of its other three, `variants`
    those of the configuration, in its order; not every one was run on every pair. `tables`: those that it gives.
    """

    pairs: Sequence[Pair]
    benchmarks: Sequence[str]
    variants: Sequence[str]
    headlines: Mapping[str, str]
    sweeps: Mapping[str, Sweep]
    draws: int
    seed: int
    native: Mapping[tuple[str, str], Record]
    injected: Mapping[tuple[str, str, str], Record]
    transfers: Mapping[tuple[str, str, str], Record]
    cards: Mapping[str, dict[str, Any]]
    manifests: Mapping[tuple[str, str], dict[str, Any]]
    paper: Paper
    held_out_benchmarks: Sequence[str] = ()
    dialogues: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tables: Sequence[str] = ()

    @property
    def models(self) -> list[str]:
        """Every model of the pairs, targets before sources, in the order of the pairs."""
        return _models(self.pairs)

    def headline(self, pair: Pair) -> str:
        """The variant that answers all benchmarks on a pair."""
        return self.headlines[pair.name]

    @property
    def headline_names(self) -> str:
        """The headlines of all pairs, each once."""
        return ", ".join(dict.fromkeys(self.headlines.values()))

    def systems(self, pair: str) -> list[str]:
        """What tables of all systems show of a pair: variants in the order of the configuration, then the zero cache, if run.

        Variants that only sweeps of SHOWN_APART have on this pair are left to the tables of these sweeps.
        """
        here = [sweep for sweep in self.sweeps.values() if pair in sweep.pairs and sweep.name not in SHOWN_APART]
        shown = {self.headlines[pair], *(variant for sweep in here for variant in sweep.variants)}
        named = [*(name for name in self.variants if name in shown), ZERO_CACHE]
        return [name for name in named if (pair, name, PERPLEXITY) in self.transfers]

    def variants_of(self, pair: str) -> list[str]:
        """Mapper variants that were run on a pair, in the order of the configuration."""
        return [name for name in self.variants if (pair, name) in self.manifests]

    def sweep(self, name: str) -> Sweep:
        """A sweep of the configuration. Raises KvferryError if there is none of this name, or no variant in it."""
        if name not in self.sweeps:
            raise KvferryError(f"sweeps.{name}: this configuration has no such sweep; add it, or leave its tables out")
        if not self.sweeps[name].variants:
            raise KvferryError(f"sweeps.{name}: names no variants, so there is nothing to compare; add some")
        return self.sweeps[name]

    def pairs_of(self, sweep: Sweep) -> list[Pair]:
        """The pairs of a sweep in the order of the report."""
        return [pair for pair in self.pairs if pair.name in sweep.pairs]

    def recipe(self, pair: str, variant: str) -> dict[str, Any]:
        """The recipe of a mapper, as it says itself."""
        return self.manifests[pair, variant]["recipe"]

    def comparable(
        self,
        pair: Pair,
        variant: str | None = None,
        *,
        methods: Container[str] = (RIDGE,),
        ropes: Container[str] = (STRIPPED,),
    ) -> str | None:
        """The paper's name of a pair, if `variant` (or the headline) is of the paper's shape and has its k for that pair."""
        name = variant or self.headline(pair)
        if pair.paper is None or not is_papers(self.recipe(pair.name, name), methods, ropes):
            return None
        return pair.paper if self.paper.k(pair.paper) == self.k(pair.name, name) else None

    def k(self, pair: str, variant: str) -> int:
        """Number of source layers that a target layer reads, counted in the mapper itself."""
        return max(len(layers) for layers in self.manifests[pair, variant]["selected_layers"])

    @classmethod
    def load(
        cls, results_root: Path, config: Mapping[str, Any], pairs: Mapping[str, Any], paper_root: Path = PAPER_ROOT
    ) -> Results:
        """Read what `config` says was run; anything else that lies under `results_root` is left alone.

        Raises:
            KvferryError: a file is missing, broken, or describes another benchmark, model or pair.
        """
        project = Project(config=dict(config), wheels={}, models={}, corpora={}, pairs=dict(pairs))
        chosen = [Pair(name, **pairs[name]) for name in config["pairs"]]
        models = _models(chosen)
        of_models = _of_models(results_root / "records", models, project)
        return cls(
            pairs=chosen,
            benchmarks=_in_order(config["evaluation"]["benchmarks"]),
            variants=list(config["variants"]),
            headlines={pair.name: project.headline(pair.name) for pair in chosen},
            sweeps={name: _sweep(name, entry) for name, entry in config["sweeps"].items()},
            draws=config["statistics"]["bootstrap"],
            seed=config["statistics"]["seed"],
            native={(model, name): own for (system, model, name), own in of_models.items() if system == NATIVE},
            injected={key: own for key, own in of_models.items() if key[0] != NATIVE},
            transfers=_of_pairs(results_root / "records" / "pairs", chosen, project),
            cards={model: _fields(results_root / "models" / model / "card.json", CARD_FIELDS) for model in models},
            manifests=_manifests(results_root / "pairs", chosen, project),
            paper=Paper(paper_root),
            held_out_benchmarks=_in_order(config["evaluation"]["benchmarks"], HELD_OUT),
            dialogues={pair.name: variants for pair in chosen if (variants := dialogue_variants(project, pair.name))},
            tables=tables_of(config),
        )


def read_probe(path: Path) -> pd.DataFrame:
    """The probe of one pair: a row for each (kind, source layer, target layer).

    Raises:
        KvferryError: the file cannot be read or lacks a column.
    """
    return _frame(path, "probe", PROBE_COLUMNS)


def read_greedy(path: Path) -> pd.DataFrame:
    """The greedy selection of one pair: a row for each (kind, target layer, head, step).

    Raises:
        KvferryError: the file cannot be read or lacks a column.
    """
    return _frame(path, "greedy selection", GREEDY_COLUMNS)


def _frame(path: Path, what: str, columns: Sequence[str]) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise KvferryError(f"{path}: not a {what} ({error}); delete it and run again") from error
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise KvferryError(f"{path}: the {what} lacks the columns {', '.join(missing)}; delete it and run again")
    return frame


def _in_order(benchmarks: Iterable[str], known: Sequence[str] = FIVE) -> list[str]:
    """Those of the paper's five, or of `known`, in that order."""
    named = set(benchmarks)
    return [name for name in known if name in named]


def _sweep(name: str, entry: Mapping[str, Any]) -> Sweep:
    return Sweep(
        name, list(entry["pairs"]), list(entry["variants"]), _in_order(entry["benchmarks"], (*FIVE, *HELD_OUT))
    )


def _models(pairs: Sequence[Pair]) -> list[str]:
    return list(dict.fromkeys([pair.target for pair in pairs] + [pair.source for pair in pairs]))


def _of_models(root: Path, models: Sequence[str], project: Project) -> dict[tuple[str, str, str], Record]:
    """By system, model and name: what models answer on their own, and the controls of targets."""
    return {
        (system, model, name): _checked(
            root / system / model / f"{name}.json", target=model, system=system, benchmark=name, pair=None
        )
        for model in models
        for system, names in records_of_model(project, model).items()
        for name in names
    }


def _of_pairs(root: Path, pairs: Sequence[Pair], project: Project) -> dict[tuple[str, str, str], Record]:
    return {
        (pair.name, system, name): _checked(
            root / pair.name / system / f"{name}.json", target=pair.target, benchmark=name, pair=pair.name
        )
        for pair in pairs
        for system, names in records_of_pair(project, pair.name).items()
        for name in names
    }


def _checked(path: Path, **expected: str | None) -> Record:
    """Read a record and refuse one that describes something else than its place says."""
    if not path.exists():
        raise KvferryError(f"{path}: the record is missing; run its evaluation first")
    record = read_record(path)
    for part, value in expected.items():
        if getattr(record, part) != value:
            found = getattr(record, part)
            raise KvferryError(f"{path}: the record has {part} {found!r} where {value!r} belongs; delete it, run again")
    return record


def _fields(path: Path, fields: Sequence[str]) -> dict[str, Any]:
    """Read a card or a manifest that has at least these fields."""
    value = read_json(path, path.stem)
    missing = [name for name in fields if name not in value]
    if missing:
        raise KvferryError(f"{path}: the {path.stem} lacks {', '.join(missing)}; delete it and run again")
    return value


def _manifests(root: Path, pairs: Sequence[Pair], project: Project) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (pair.name, variant): _fields(root / pair.name / "mappers" / variant / "manifest.json", MANIFEST_FIELDS)
        for pair in pairs
        for variant in variants_of(project, pair.name)
    }
