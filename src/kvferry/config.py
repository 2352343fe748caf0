"""The configuration of a run: the config and the four registries it names, checked together before any work.

A config may bring entries of its own, so that one file says all about a run of models that no registry has.

Knows which names must exist and which numbers must agree between the files. Does not know how anything is computed,
nor which program read the config.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry import crosscheck
from kvferry.errors import KvferryError
from kvferry.schema import choices, problem, validated
from kvferry.sweeps import OF_HEADLINE, expanded, settled
from kvferry.yamlfile import read_yaml

__all__ = ["Geometry", "Project", "load_project", "read_yaml"]

REGISTRIES = ("wheels", "models", "corpora", "pairs")


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's KV cache: decoder layers, KV heads of a layer, numbers of a head."""

    layers: int
    kv_heads: int
    head_dim: int

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of a token's keys and values in all layers, in numbers of `itemsize` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class Project:
    """A checked config with its defaults, and the entries of the registries by name; paths are relative to `root`."""

    config: dict[str, Any]
    wheels: dict[str, Any]
    models: dict[str, Any]
    corpora: dict[str, Any]
    pairs: dict[str, Any]
    root: Path = Path(".")

    def geometry(self, model: str) -> Geometry | None:
        """The geometry of a model, or None where it is not known before the model is there.

        Raises KvferryError if the model is unknown or the config.json of a local one cannot be read.
        """
        entry = _named(self.models, model, "model")
        if entry["kind"] == "local":
            return _local_geometry(self.root / entry["path"] / "config.json")
        if entry["kind"] == "pruned":
            return _less_layers(self.geometry(entry["base"]), entry["remove"])
        return Geometry(**entry["geometry"]) if "geometry" in entry else None

    def parameters(self, model: str) -> float | None:
        """About how many weights a model has, None where nothing says so; a pruned one has no more than its base."""
        entry = _named(self.models, model, "model")
        if "parameters" in entry:
            return entry["parameters"] * 1e9
        if entry["kind"] == "local":
            size = sum(file.stat().st_size for file in (self.root / entry["path"]).glob("*.safetensors"))
            # of two bytes each or more
            return size / 2 or None
        return self.parameters(entry["base"]) if entry["kind"] == "pruned" else None

    def pair(self, name: str) -> dict[str, Any]:
        """The entry of a pair: source, target, paper. Raises KvferryError if it is unknown."""
        return _named(self.pairs, name, "pair")

    def variant(self, name: str) -> dict[str, Any]:
        """The recipe of a variant. Raises KvferryError if it is unknown."""
        return _named(self.config["variants"], name, "variant")

    def headline(self, pair: str) -> str:
        """The name of the variant that answers all benchmarks on a pair."""
        own = self.config["headline"]
        return own if isinstance(own, str) else own["pairs"].get(pair, own["default"])

    def recipe(self, pair: str, variant: str) -> dict[str, Any]:
        """The recipe of a variant on a pair: `k: headline` is the k of the pair's headline.

        Raises KvferryError if the variant is unknown.
        """
        own = self.variant(variant)
        return own | {"k": self.variant(self.headline(pair))["k"]} if own["k"] == OF_HEADLINE else own

    def models_of_run(self) -> list[str]:
        """The sources and targets of the run's pairs in the order of first use, without the bases of pruned ones."""
        pairs = [self.pair(name) for name in self.config["pairs"]]
        return list(dict.fromkeys(pair[role] for pair in pairs for role in ("source", "target")))


def load_project(config: dict[str, Any], config_name: str, schemas: Path, root: Path = Path(".")) -> Project:
    """Check a parsed config, fill its defaults in, and read and check the registries it names, relative to `root`.

    `config_name` is what messages call the config; `schemas` is the directory of the schemas. Raises KvferryError
    about the first thing that is wrong.
    """
    filled = settled(validated(expanded(config), schemas / "config.schema.yaml", config_name))
    files = {"config": config_name} | {name: str(root / filled["registries"][name]) for name in REGISTRIES}
    registries = {name: _registry(name, read_yaml(Path(files[name])), schemas, files[name]) for name in REGISTRIES}
    for name, entries in filled.get("own", {}).items():
        _add_own(name, registries[name], entries, schemas, files)
    project = Project(config=filled, root=root, **registries)
    crosscheck.check(project, files)
    return project


def _registry(name: str, value: object, schemas: Path, file: str) -> dict[str, Any]:
    return validated(value, schemas / f"{name}.schema.yaml", file)[name]


def _add_own(name: str, known: dict[str, Any], entries: object, schemas: Path, files: dict[str, str]) -> None:
    """Add what the config itself brings to a registry, and to `files` what messages call the place of each entry."""
    place = f"{files['config']}: own"
    for entry, value in _registry(name, {name: entries}, schemas, place).items():
        if entry in known:
            raise problem(place, (name, entry), f"the name is also in {files[name]}; rename it")
        known[entry] = value
        files[f"{name}.{entry}"] = place


def _named(entries: dict[str, Any], name: str, what: str) -> dict[str, Any]:
    if name not in entries:
        raise KvferryError(f"{name!r} is no {what} of this configuration; {choices(name, entries)}")
    return entries[name]


def _less_layers(base: Geometry | None, removed: list[list[int]]) -> Geometry | None:
    if base is None:
        return None
    layers = base.layers - sum(end - first for first, end in removed)
    return Geometry(layers, base.kv_heads, base.head_dim)


def _local_geometry(path: Path) -> Geometry | None:
    """Read the geometry from a model's own config.json, where it may be that of the text decoder inside a larger model.

    None if the file is absent or says it in another way.
    """
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text())
        settings = settings.get("text_config", settings)
        layers, heads = settings["num_hidden_layers"], settings["num_attention_heads"]
        head_dim = settings.get("head_dim") or settings["hidden_size"] // heads
        numbers = (layers, settings.get("num_key_value_heads") or heads, head_dim)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        return None
    except (OSError, ValueError) as error:
        raise KvferryError(f"{path}: unreadable config.json of a model ({error}); restore it") from error
    return Geometry(*numbers) if all(isinstance(number, int) and number > 0 for number in numbers) else None


def main(config_name: str) -> None:
    """Check a config file and print its results directory; what is wrong is said in one sentence, with exit status 1."""
    try:
        project = load_project(read_yaml(Path(config_name)), config_name, Path("workflow/schemas"))
    except KvferryError as error:
        sys.exit(str(error))
    print(project.config["results"])


if __name__ == "__main__":
    main(*sys.argv[1:])
