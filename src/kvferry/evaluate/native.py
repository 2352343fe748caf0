"""A model on its own and, if asked, through its own cache injected, in one job.

The model on its own goes first and takes the plain way; the other takes its prefills from memory, so that a difference
between the two is the hand-off's. Does not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvferry.evaluate.contest import answer
from kvferry.evaluate.controls import Passthrough
from kvferry.evaluate.kept import publish
from kvferry.evaluate.setting import Contestant, Setting
from kvferry.kv.handoff import Handoff, Native
from kvferry.kv.prefill import Memory
from kvferry.records import NATIVE, NATIVE_INJECTED


def run_native(setting: Setting, outputs: Mapping[str, Mapping[str, Path]]) -> None:
    """Answer the config's benchmarks and write the records; outputs: NATIVE and perhaps NATIVE_INJECTED → benchmark → path.

    Raises:
        KvferryError: items that were asked for were not answered.
    """
    evaluation, model = setting.evaluation, setting.target.model
    limits = {name: None if evaluation["full"] else how["limit"] for name, how in evaluation["benchmarks"].items()}
    name = setting.target.card["model"]
    own = Native(model, setting.memory if NATIVE_INJECTED in outputs else Memory())
    entries = [(Contestant(NATIVE, name, {}, limits, dict(outputs[NATIVE])), own)]
    if NATIVE_INJECTED in outputs:
        injected = Handoff(model, model, Passthrough(), memory=setting.memory)
        entries.append((Contestant(NATIVE_INJECTED, name, {}, limits, dict(outputs[NATIVE_INJECTED]), name), injected))
    answer(setting, own, entries)
    for who, _ in entries:
        publish(who, setting)
