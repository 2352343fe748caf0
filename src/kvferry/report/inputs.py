"""Everything that tables and figures are made from, gathered from disk into one object.

Knows where the workflow puts records, cards and manifests. Does not know statistics or how a table looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvferry.errors import KvferryError
from kvferry.files import read_json
from kvferry.records import NATIVE, NATIVE_INJECTED, PERPLEXITY, ZERO_CACHE, Record, read_record
from kvferry.report.paper import FIVE, PAPER_ROOT, Paper

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


@dataclass(frozen=True)
class Pair:
    """An ordered pair of models; `paper` is its name in the paper, if it is there."""

    name: str
    source: str
    target: str
    paper: str | None = None


@dataclass(frozen=True, eq=False)
class Results:
    """What one configuration produced.

    `native` and `injected` are keyed by (model, benchmark), `transfers` by (pair, system, benchmark),
    `manifests` by (pair, variant), `cards` by model. `benchmarks` are those of the paper's five that were run.
    """

    pairs: Sequence[Pair]
    benchmarks: Sequence[str]
    variants: Sequence[str]
    headline: str
    draws: int
    seed: int
    native: Mapping[tuple[str, str], Record]
    injected: Mapping[tuple[str, str], Record]
    transfers: Mapping[tuple[str, str, str], Record]
    cards: Mapping[str, dict[str, Any]]
    manifests: Mapping[tuple[str, str], dict[str, Any]]
    paper: Paper

    @property
    def models(self) -> list[str]:
        """Every model of the pairs, targets before sources, in the order of the pairs."""
        return _models(self.pairs)

    def systems(self, pair: str) -> list[str]:
        """Mapper variants of a pair in the order of the configuration, then the zero cache if it was run."""
        return [s for s in (*self.variants, ZERO_CACHE) if (pair, s, PERPLEXITY) in self.transfers]

    def comparable(self, pair: Pair) -> str | None:
        """The paper's name of a pair, if the paper's transfer used as many source layers as the headline does here."""
        if pair.paper is None or self.paper.value("table10", pair.paper, "k") != self.k(pair.name, self.headline):
            return None
        return pair.paper

    def k(self, pair: str, variant: str) -> int:
        """Number of source layers that a target layer reads, counted in the mapper itself."""
        return max(len(layers) for layers in self.manifests[pair, variant]["selected_layers"])

    @classmethod
    def load(
        cls, results_root: Path, config: Mapping[str, Any], pairs: Mapping[str, Any], paper_root: Path = PAPER_ROOT
    ) -> Results:
        """Read what `config` says was run; anything else that lies under `results_root` is left alone.

        The controls (native_injected, zero_cache) may be absent; all else must be there.

        Raises:
            KvferryError: a file is missing, broken, or describes another benchmark, model or pair.
        """
        chosen = [Pair(name, **pairs[name]) for name in config["pairs"]]
        models, variants = _models(chosen), list(config["variants"])
        benchmarks = [name for name in FIVE if name in config["evaluation"]["benchmarks"]]
        records = results_root / "records"
        return cls(
            pairs=chosen,
            benchmarks=benchmarks,
            variants=variants,
            headline=config["headline"],
            draws=config["statistics"]["bootstrap"],
            seed=config["statistics"]["seed"],
            native=_of_models(records / NATIVE, models, benchmarks, required=True),
            injected=_of_models(records / NATIVE_INJECTED, models, benchmarks, required=False),
            transfers=_of_pairs(records / "pairs", chosen, variants, config["headline"], benchmarks),
            cards={model: _fields(results_root / "models" / model / "card.json", CARD_FIELDS) for model in models},
            manifests=_manifests(results_root / "pairs", chosen, variants),
            paper=Paper(paper_root),
        )


def read_probe(path: Path) -> pd.DataFrame:
    """The probe of one pair: a row for each (kind, source layer, target layer).

    Raises:
        KvferryError: the file cannot be read or lacks a column.
    """
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise KvferryError(f"{path}: not a probe ({error}); delete it and run again") from error
    missing = [name for name in PROBE_COLUMNS if name not in frame.columns]
    if missing:
        raise KvferryError(f"{path}: the probe lacks the columns {', '.join(missing)}; delete it and run again")
    return frame


def _models(pairs: Sequence[Pair]) -> list[str]:
    return list(dict.fromkeys([pair.target for pair in pairs] + [pair.source for pair in pairs]))


def _of_models(
    root: Path, models: Sequence[str], benchmarks: Sequence[str], *, required: bool
) -> dict[tuple[str, str], Record]:
    places = {(m, b): root / m / f"{b}.json" for m in models for b in (*benchmarks, PERPLEXITY)}
    wanted = {key: path for key, path in places.items() if required or path.exists()}
    return {(m, b): _checked(path, target=m, benchmark=b, pair=None) for (m, b), path in wanted.items()}


def _of_pairs(
    root: Path, pairs: Sequence[Pair], variants: Sequence[str], headline: str, benchmarks: Sequence[str]
) -> dict[tuple[str, str, str], Record]:
    found = {}
    for pair in pairs:
        wanted = [(variant, PERPLEXITY) for variant in variants] + [(headline, name) for name in benchmarks]
        zero = root / pair.name / ZERO_CACHE / f"{PERPLEXITY}.json"
        for system, name in wanted + ([(ZERO_CACHE, PERPLEXITY)] if zero.exists() else []):
            path = root / pair.name / system / f"{name}.json"
            found[pair.name, system, name] = _checked(path, target=pair.target, benchmark=name, pair=pair.name)
    return found


def _checked(path: Path, **expected: str | None) -> Record:
    """Read a record and refuse one that describes something else than its place says."""
    if not path.exists():
        raise KvferryError(f"{path}: the record is missing; run its evaluation first")
    record = read_record(path)
    for field, value in expected.items():
        if getattr(record, field) != value:
            found = getattr(record, field)
            raise KvferryError(
                f"{path}: the record has {field} {found!r} where {value!r} belongs; delete it, run again"
            )
    return record


def _fields(path: Path, fields: Sequence[str]) -> dict[str, Any]:
    """Read a card or a manifest that has at least these fields."""
    value = read_json(path, path.stem)
    missing = [name for name in fields if name not in value]
    if missing:
        raise KvferryError(f"{path}: the {path.stem} lacks {', '.join(missing)}; delete it and run again")
    return value


def _manifests(root: Path, pairs: Sequence[Pair], variants: Sequence[str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (pair.name, variant): _fields(root / pair.name / "mappers" / variant / "manifest.json", MANIFEST_FIELDS)
        for pair in pairs
        for variant in variants
    }
