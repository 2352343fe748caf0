"""A pair's hand-offs through many mappers, and through a cache of zeros, in one job.

As many mappers as fit in MAPPER_BYTES are loaded together (all of a run on small models) and share each prefill of the
source and the target's own reading; further ones make another round. Does not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.evaluate.contest import answer
from kvferry.evaluate.controls import ZeroCache
from kvferry.evaluate.kept import missing, publish
from kvferry.evaluate.setting import Contestant, Setting
from kvferry.kv.handoff import Handoff, Native, Translator
from kvferry.kv.mapper import load_mapper, read_manifest
from kvferry.prepare.models import Loaded

MAPPER_BYTES = 2_000_000_000
# of a manifest: what decides how the mapper maps
DECIDING = ("weights_sha256", "map", "rope", "selected_layers")


@dataclass(frozen=True)
class Asked:
    """What is asked of one system: items of each lm-eval benchmark (None: all), native head, and paths of the records."""

    limits: dict[str, int | None]
    native_head: int
    outputs: dict[str, Path]


def run_pair(
    setting: Setting, source: Loaded, pair: str, asked: Mapping[str, Asked], mappers: Mapping[str, Path]
) -> None:
    """Answer all that is asked, by system, and write the records; mappers: directories by system, none for a zeroed cache.

    Raises:
        KvferryError: a mapper is unreadable or was fitted for other models, or items were not answered.
    """
    manifests = {name: read_manifest(directory) for name, directory in mappers.items()}
    everyone = [
        _contestant(source, setting.target, pair, name, how, manifests.get(name)) for name, how in asked.items()
    ]
    due = [who for who in everyone if missing(who, setting, who.outputs)]
    own = Native(setting.target.model)
    for group in together(due, {name: manifest["weights_bytes"] for name, manifest in manifests.items()}):
        answer(setting, own, [(who, _handoff(who, setting, source, mappers.get(who.name))) for who in group])
    for who in everyone:
        publish(who, setting)


def _contestant(
    source: Loaded, target: Loaded, pair: str, name: str, how: Asked, manifest: dict[str, Any] | None
) -> Contestant:
    """The system of this name; without a manifest it is the zeroed cache."""
    mapper = {key: manifest[key] for key in DECIDING} if manifest else None
    return Contestant(
        name,
        target.card["model"],
        {"source": source.card["weights_id"], "mapper": mapper},
        how.limits,
        how.outputs,
        source.card["model"],
        pair,
        how.native_head,
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


def _handoff(who: Contestant, setting: Setting, source: Loaded, directory: Path | None) -> Handoff:
    """The contestant's system, with its mapper loaded."""
    target = setting.target
    carrier: Translator = ZeroCache.like(target.card)
    if directory is not None:
        mapper, _ = load_mapper(directory, source.card, target.card)
        carrier = mapper.to(target.model.device)
    return Handoff(source.model, target.model, carrier, who.native_head, setting.memory)
