"""All that is asked of the systems of a job, answered so that they share prefills; what is finished is not run again.

Benchmarks are outermost and systems innermost: what one system has prefilled is in memory when the next one needs it. Does not
know pairs, nor where a system comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.evaluate.kept import keep, missing
from kvferry.evaluate.perplexity import METRICS, Cut, measure_chunks
from kvferry.evaluate.run import run_benchmark
from kvferry.evaluate.setting import Contestant, Outcome, Setting, record_of
from kvferry.evaluate.timing import METRIC, make_load, time_translation
from kvferry.kv.handoff import Handoff, Native, System
from kvferry.provenance import Stopwatch
from kvferry.records import APPLY_TIME, Item

Entry = tuple[Contestant, System]


def answer(setting: Setting, own: Native, entries: Sequence[Entry]) -> None:
    """Measure and answer what is not finished, and keep the records. `own`: the target on its own, as in `measure_chunks`."""
    _measure(setting, own, entries)
    _time(setting, entries)
    for name in dict.fromkeys(name for who, _ in entries for name in who.limits):
        for who, system in entries:
            if name in who.limits and missing(who, setting, [name]):
                keep(who, setting, record_of(who, setting, run_benchmark(who, system, setting, name)))
        setting.memory.clear()


def _measure(setting: Setting, own: Native, entries: Sequence[Entry]) -> None:
    """The measures of the next token, of all systems in one pass; the pass's time is shared out among the records."""
    due = {who.name: (who, system) for who, system in entries if missing(who, setting, METRICS)}
    if not due:
        return
    watch, how = Stopwatch(), setting.config["perplexity"]
    cut = Cut(how["prefix"], setting.evaluation["hold_back"])
    systems = {name: system for name, (_, system) in due.items()}
    found = measure_chunks(own, systems, setting.chunks, cut, setting.memory)
    facts = {"prefix": how["prefix"], "scored": how["scored"], "items_total": len(setting.chunks)}
    seconds = watch.seconds() / (len(due) * len(METRICS))
    for name, (who, _) in due.items():
        for measure in missing(who, setting, METRICS):
            items = found[name][measure]
            outcome = _on_chunks(setting, measure, METRICS[measure], items, seconds, facts)
            keep(who, setting, record_of(who, setting, outcome))


def _time(setting: Setting, entries: Sequence[Entry]) -> None:
    """The time of each mapper, all on one source prefill."""
    due = [(who, system) for who, system in entries if missing(who, setting, [APPLY_TIME])]
    load = None
    for who, system in due:
        assert isinstance(system, Handoff), f"{who.name} has no mapper to time"
        load = load or make_load(system.source, system.target, setting.chunks)
        watch = Stopwatch()
        items = time_translation(system.mapper, load)
        outcome = _on_chunks(setting, APPLY_TIME, METRIC, items, watch.seconds(), {"items_total": len(items)})
        keep(who, setting, record_of(who, setting, outcome))


def _on_chunks(
    setting: Setting, name: str, metric: str, items: list[Item], seconds: float, facts: dict[str, Any]
) -> Outcome:
    """The outcome of something that was measured on the chunks."""
    how = setting.config["perplexity"]
    data = {"origin": how["corpus"], "tokens_sha256": setting.chunks_id}
    return Outcome(name, metric, items, seconds, facts, data, how["seed"])
