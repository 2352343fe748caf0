"""A pair's hand-offs through many mappers, and its controls, in one job.

As many mappers as fit in MAPPER_BYTES are loaded together (all of a run on small models) and share each prefill of the
source and the target's own reading; further ones make another round. Does not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvferry.evaluate.contest import answer
from kvferry.evaluate.controls import WrongDocument, ZeroCache, random_like
from kvferry.evaluate.kept import missing, publish
from kvferry.evaluate.setting import Contestant, Setting
from kvferry.files import fingerprint
from kvferry.kv.cache import layer_devices
from kvferry.kv.handoff import Handoff, Native, System
from kvferry.kv.mapper import load_mapper, read_manifest
from kvferry.prepare.models import Loaded
from kvferry.records import RANDOM_MAPPER, WRONG_DOCUMENT

MAPPER_BYTES = 2_000_000_000
# of a manifest: what decides how the mapper maps
DECIDING = ("weights_sha256", "map", "rope", "selected_layers")


@dataclass(frozen=True)
class Asked:
    """What is asked of one system: items of each lm-eval benchmark (None: all), native head, paths of the records, and which
    shard of the items, if it is one.
    """

    limits: dict[str, int | None]
    native_head: int
    outputs: dict[str, Path]
    shard: tuple[int, int] | None = None


def asked_of(given: Mapping[str, Any], heads: Mapping[str, int] = MappingProxyType({})) -> dict[str, Asked]:
    """What is asked by system, from plain values: limits and paths of records by system, and the shard."""
    shard = tuple(given["shard"]) if given["shard"] else None
    return {
        system: Asked(limits, heads.get(system, 0), {n: Path(p) for n, p in given["records"][system].items()}, shard)
        for system, limits in given["limits"].items()
    }


def run_pair(
    setting: Setting, source: Loaded, pair: str, asked: Mapping[str, Asked], mappers: Mapping[str, Path]
) -> None:
    """Answer all that is asked, by system, and write the records.

    mappers: directory by system, of its own mapper or the one that a control is made from; none for a zeroed cache.

    Raises:
        KvferryError: a mapper is unreadable or was fitted for other models, or items were not answered.
    """
    manifests = {name: read_manifest(directory) for name, directory in mappers.items()}
    everyone = [contestant(source, setting, pair, name, how, manifests.get(name)) for name, how in asked.items()]
    due = [who for who in everyone if missing(who, setting, who.outputs)]
    own = Native(setting.target.model)
    for group in together(due, {name: manifest["weights_bytes"] for name, manifest in manifests.items()}):
        answer(setting, own, [(who, _system(who, setting, source, mappers.get(who.name))) for who in group])
    for who in everyone:
        publish(who, setting)


def contestant(
    source: Loaded, setting: Setting, pair: str | None, name: str, how: Asked, manifest: dict[str, Any] | None
) -> Contestant:
    """The system of this name; without a manifest it is the zeroed cache."""
    mapper = {key: manifest[key] for key in DECIDING} if manifest else None
    identity = {"source": source.card["weights_id"], "mapper": mapper}
    if name == RANDOM_MAPPER:
        identity |= {"seed": setting.config["controls"]["seed"]}
    if name == WRONG_DOCUMENT:
        identity |= {"other": fingerprint(setting.other.tolist())}
    return Contestant(
        name,
        setting.target.card["model"],
        identity,
        how.limits,
        how.outputs,
        source.card["model"],
        pair,
        how.native_head,
        how.shard,
    )


def together(due: Sequence[Contestant], sizes: Mapping[str, int]) -> Iterator[list[Contestant]]:
    """Groups, in order, whose mappers take MAPPER_BYTES together at most, or of one; `sizes` in bytes, 0 where there is none."""
    group: list[Contestant] = []
    for who in due:
        if group and sum(sizes.get(own.name, 0) for own in (*group, who)) > MAPPER_BYTES:
            yield group
            group = []
        group.append(who)
    if group:
        yield group


def _system(who: Contestant, setting: Setting, source: Loaded, directory: Path | None) -> System:
    """The contestant's system, with its mapper loaded."""
    target, memory = setting.target, setting.memory
    if directory is None:
        return Handoff(source.model, target.model, ZeroCache.like(target.card), who.native_head, memory)
    mapper, _ = load_mapper(directory, source.card, target.card)
    if who.name == RANDOM_MAPPER:
        mapper = random_like(mapper, setting.config["controls"]["seed"])
    handoff = Handoff(source.model, target.model, mapper.onto(layer_devices(target.model)), who.native_head, memory)
    return WrongDocument(handoff, setting.other) if who.name == WRONG_DOCUMENT else handoff
