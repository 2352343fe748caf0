"""A model on its own and, for a target, through its own cache: injected as it is, or mapped to itself; in one job.

The model on its own goes first and takes the plain way; the others take its prefills from memory, so that a difference
between them is the hand-off's. Does not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvferry.evaluate.contest import Entry, answer
from kvferry.evaluate.controls import Passthrough
from kvferry.evaluate.kept import publish
from kvferry.evaluate.pair import Asked, contestant
from kvferry.evaluate.setting import Contestant, Setting
from kvferry.kv.cache import layer_devices
from kvferry.kv.handoff import Handoff, Native, Translator
from kvferry.kv.mapper import load_mapper, read_manifest
from kvferry.kv.prefill import Memory
from kvferry.records import NATIVE, NATIVE_INJECTED


def run_native(setting: Setting, asked: Mapping[str, Asked], mapper: Path | None = None) -> None:
    """Answer what is asked by system and write the records: NATIVE, and perhaps NATIVE_INJECTED and IDENTITY.

    mapper: directory of the target's mapper to itself, which IDENTITY needs.

    Raises:
        KvferryError: items that were asked for were not answered, or the mapper is unreadable or was fitted for another model.
    """
    target = setting.target
    native, controls = asked[NATIVE], {name: how for name, how in asked.items() if name != NATIVE}
    own = Native(target.model, setting.memory if controls else Memory())
    who = Contestant(NATIVE, target.card["model"], {}, native.limits, native.outputs, shard=native.shard)
    entries: list[Entry] = [(who, own)]
    for name, how in controls.items():
        directory = None if name == NATIVE_INJECTED else mapper
        manifest = None if directory is None else read_manifest(directory)
        system = Handoff(target.model, target.model, _carrier(setting, directory), memory=setting.memory)
        entries.append((contestant(target, setting, None, name, how, manifest), system))
    answer(setting, own, entries)
    for who, _ in entries:
        publish(who, setting)


def _carrier(setting: Setting, directory: Path | None) -> Translator:
    """The target's mapper to itself, or what hands its cache on as it is."""
    if directory is None:
        return Passthrough()
    card = setting.target.card
    return load_mapper(directory, card, card)[0].onto(layer_devices(setting.target.model))
