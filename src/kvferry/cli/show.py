"""`kvferry show`: what a mapper on disk is, by its manifest, once its files have been verified. Computes no cache."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from kvferry.errors import KvferryError
from kvferry.sweeps import same

if TYPE_CHECKING:
    from kvferry.kv.mapper import Mapper

Manifest = dict[str, Any]
HELP = """\
verify a mapper on disk and print what it is

Checks the format of the manifest, the sha256 of manifest and weights, and the shapes of all tensors. A damaged mapper is
refused in one sentence, with exit status 1.

example:
  kvferry show results/pairs/24l-to-30l/mappers/ridge_k8"""
STATED = ("source", "target", "recipe", "calibration", "features", "rows", "held_out_rows", "r2")
HASH_SHOWN = 12
MEGABYTE = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which mapper."""
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT", help="the directory of a mapper")


def run(args: argparse.Namespace) -> int:
    """Print the manifest of a mapper that is whole.

    Raises:
        KvferryError: it is no mapper, of another format, altered, truncated, or its tensors are not what the manifest says.
    """
    mapper, manifest = _verified(args.artifact)
    facts = _facts(mapper, manifest)
    width = max(map(len, facts))
    print(f"{args.artifact}: a mapper, whole and unaltered\n")
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in facts.items()))
    return 0


def _verified(directory: Path) -> tuple[Mapper, Manifest]:
    """The mapper and its manifest."""
    from kvferry.api.ferry import mapper_at
    from kvferry.kv.mapper import MANIFEST, load_mapper, read_manifest

    manifest = read_manifest(mapper_at(directory))
    absent = [key for key in STATED if key not in manifest]
    if absent:
        raise KvferryError(f"{directory / MANIFEST}: says nothing of {', '.join(absent)}; fit the mapper again")
    mapper, _ = load_mapper(directory, manifest["source"], manifest["target"])
    _check_shapes(directory, mapper, manifest)
    return mapper, manifest


def _check_shapes(directory: Path, mapper: Mapper, manifest: Manifest) -> None:
    """Refuse maps that are not all of one shape, or have not as many weights as the manifest says."""
    shapes = {
        tuple((name, tuple(tensor.shape)) for name, tensor in own.tensors().items())
        for own in (*mapper.keys, *mapper.values)
    }
    layers = {len(chosen) for chosen in mapper.selected}
    if len(shapes) != 1 or len(layers) != 1 or mapper.parameters != manifest["parameters"]:
        raise KvferryError(f"{directory}: its tensors have not the shapes that its manifest says; fit the mapper again")


def _facts(mapper: Mapper, manifest: Manifest) -> dict[str, str]:
    """What the manifest says, in words, in the order of interest."""
    recipe, rows, features = manifest["recipe"], manifest["rows"], manifest["features"]
    size = (
        f"{manifest['parameters']:,} parameters in {manifest['dtype']}, {manifest['weights_bytes'] / MEGABYTE:,.1f} MB"
    )
    return {
        **{role: _model(manifest[role]) for role in ("source", "target")},
        "recipe": _words({"method": recipe["method"]} | same(recipe)),
        "map": f"{manifest['map']}, keys {manifest['rope']}",
        "layers": f"{len(mapper.selected)} target layers read {len(mapper.selected[0])} source layers each",
        "size": size,
        "calibration": _words(manifest["calibration"]),
        "rows": f"n = {rows:,} fitted on, p = {features:,} features of a head, p/n = {features / rows:.3f}",
        "R² in sample": _r2(manifest["r2"]["in_sample"]),
        "R² held out": f"{_r2(manifest['r2']['held_out'])} ({manifest['held_out_rows']:,} rows)",
        "format": str(manifest["format"]),
        "sha256": manifest["weights_sha256"],
        **_selection(mapper.selected),
    }


def _words(settings: dict[str, Any]) -> str:
    """Keys and values on one line; a group of settings in brackets."""
    return ", ".join(
        f"{key} ({_words(value)})" if isinstance(value, dict) else f"{key} {value}" for key, value in settings.items()
    )


def _model(identity: dict[str, str]) -> str:
    """A model's name and origin, with what tells it from another of that name."""
    ids = {"config": "config_sha256", "tokenizer": "tokenizer_sha256", "weights": "weights_id"}
    hashes = ", ".join(f"{what} {identity[key][:HASH_SHOWN]}" for what, key in ids.items())
    return f"{identity['model']}, {identity['origin']} ({hashes})"


def _r2(layers: dict[str, list[float]]) -> str:
    """Mean over the target layers, and the worst of them."""
    return ", ".join(f"{kind.upper()} {mean(own):.3f} (worst layer {min(own):.3f})" for kind, own in layers.items())


def _selection(selected: Sequence[Sequence[int]]) -> dict[str, str]:
    """The source layers that each target layer reads, in the order of the features."""
    return {f"target layer {layer}": "reads " + ", ".join(map(str, own)) for layer, own in enumerate(selected)}
