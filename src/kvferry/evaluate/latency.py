"""How long a hand-off takes by number of tokens, against the target's reading them itself (the paper, Table 5 and Figure 9).

Three times a length: the mapper's (all that `Handoff.ferry` does: rotation taken off, mapping, rotation put on, the result in
the target's cache, and the native head where the recipe has one), and either model's own prefill of the same tokens. All
mappers of a job are timed in the same rounds and each model's prefill once, whichever pairs it is in. A prefill is the
model's body and its head for the last token alone. And once a mapper: reading it from disk, checks included.
Knows no text: the tokens are drawn.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor

from kvferry.evaluate.clock import Effort, names_of, time_trials
from kvferry.evaluate.kept import keep, missing, publish
from kvferry.evaluate.mapped import Mapped
from kvferry.evaluate.setting import MEGABYTE, Contestant, Outcome, Setting, record_of
from kvferry.evaluate.tasks import Questions
from kvferry.kv.cache import LayerKV, cache_layers, devices_of, layer_devices
from kvferry.kv.handoff import Handoff, empty_prefix, read
from kvferry.kv.prefill import Span
from kvferry.prepare.decoder import positions_of
from kvferry.prepare.models import Loaded
from kvferry.progress import track
from kvferry.provenance import Stopwatch
from kvferry.records import LATENCY, LOAD, MAPPER, SOURCE_PREFILL, TARGET_PREFILL, Item

METRIC = "ms"
# A length is not begun where one call alone would take this many times the seconds that a length is given.
PATIENCE = 2.0
SEED = 0
PREFILL = "prefill"

Call = tuple[str, int]


@dataclass
class Times:
    """Of one mapper: an item a trial, and why a length was skipped."""

    items: list[Item] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, length: int, trials: Sequence[float]) -> None:
        """Note the milliseconds of trials."""
        self.items += [Item(f"{what}/{length}/{number}", value) for number, value in enumerate(trials)]


def run_latency(config: Mapping[str, Any], mappers: Sequence[Mapped]) -> None:
    """Time mappers and the prefills of their models, and write a LATENCY record each; all of the same two models.

    config: `latency` (lengths, warm_up, trials, seconds a length, batch, and perhaps memory_mb), `evaluation`, `compute`.

    Raises:
        KvferryError: a mapper is unreadable or was fitted for other models.
    """
    how = config[LATENCY]
    facts = _facts(how, mappers[0].devices)
    entries = [(one, one.contestant(latency=facts), timing_setting(config, one.target)) for one in mappers]
    due = [entry for entry in entries if missing(entry[1], entry[2], [LATENCY])]
    watch = Stopwatch()
    measured = measure_latency([one for one, _, _ in due], how) if due else []
    for (_, who, setting), times in zip(due, measured, strict=True):
        _keep(who, setting, times, watch.seconds() / len(due), facts)
    for _, who, setting in entries:
        publish(who, setting)


def timing_setting(config: Mapping[str, Any], target: Loaded) -> Setting:
    """A setting without benchmarks and texts: times depend on neither."""
    return Setting({**config, "perplexity": {}}, target, Questions(None), torch.empty(0, dtype=torch.long))


def _facts(how: Mapping[str, Any], devices: Sequence[torch.device]) -> dict[str, Any]:
    """What the record says of the measurement, beside the protocol."""
    asked = {name: how[name] for name in ("lengths", "batch", "warm_up", "trials", "seconds")}
    return asked | {"threads": torch.get_num_threads(), "device_name": names_of(devices)}


def _keep(who: Contestant, setting: Setting, times: Times, seconds: float, facts: dict[str, Any]) -> None:
    origin = {"origin": "tokens drawn at random"}
    told = facts | {"skipped": times.skipped, "items_total": len(times.items)}
    keep(who, setting, record_of(who, setting, Outcome(LATENCY, METRIC, times.items, seconds, told, origin, SEED)))


def measure_latency(mappers: Sequence[Mapped], how: Mapping[str, Any]) -> list[Times]:
    """The times of each mapper, lengths ascending."""
    effort = Effort(how["warm_up"], how["trials"], how["seconds"])
    systems, found = [one.handoff() for one in mappers], [Times() for _ in mappers]
    for one, times in zip(mappers, found, strict=True):
        times.add(LOAD, 0, time_trials({LOAD: one.load}, one.devices, effort)[LOAD])
    pace = 0.0
    for length in track(sorted(set(how["lengths"])), "latency", "length"):
        reasons = [_why_not(one, length, how, pace) for one in mappers]
        able = [number for number, reason in enumerate(reasons) if reason is None]
        for number, reason in enumerate(reasons):
            if reason is not None:
                found[number].skipped[str(length)] = reason
                logging.info("%s: %d tokens are skipped: %s", mappers[number].pair, length, reason)
        if able:
            pace = _time(length, {number: (mappers[number], systems[number]) for number in able}, found, how, effort)
    return found


def _time(
    length: int,
    entries: Mapping[int, tuple[Mapped, Handoff]],
    found: Sequence[Times],
    how: Mapping[str, Any],
    effort: Effort,
) -> float:
    """Time mappers, by their number, and their models on one length. Returns milliseconds a token of the slowest call."""
    models = {loaded.card["model"]: loaded for one, _ in entries.values() for loaded in (one.source, one.target)}
    sources = {one.source.card["model"] for one, _ in entries.values()}
    vocabulary = min(loaded.card["vocab_size"] for loaded in models.values())
    bench = Bench(drawn(how["batch"], length, vocabulary), sources, {own.model.device for own in models.values()})
    # prefills first: the mappers of the round are given what these left
    calls: dict[tuple[str, str | int], Callable[[], object]] = {
        (PREFILL, name): lambda loaded=loaded: bench.prefill(loaded) for name, loaded in models.items()
    }
    calls |= {
        (MAPPER, number): lambda one=one, system=system: bench.carry(one, system)
        for number, (one, system) in entries.items()
    }
    times = time_trials(calls, devices_of(*(loaded.model for loaded in models.values())), effort)
    for number, (one, _) in entries.items():
        found[number].add(MAPPER, length, times[MAPPER, number])
        found[number].add(SOURCE_PREFILL, length, times[PREFILL, one.source.card["model"]])
        found[number].add(TARGET_PREFILL, length, times[PREFILL, one.target.card["model"]])
    return max(min(trials) for trials in times.values()) / length


def drawn(batch: int, length: int, vocabulary: int) -> Tensor:
    """Token ids `[batch, length]`, the same at every call."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(SEED))


class Bench:
    """What is timed on one length's tokens `[batch, length]`; caches: what each source prefilled last, by its name.

    The tokens are on each of the `devices` beforehand, so that no time holds their copy.
    """

    def __init__(self, ids: Tensor, sources: Iterable[str], devices: Iterable[torch.device]) -> None:
        self.span, self.sources = Span(ids, torch.ones_like(ids)), frozenset(sources)
        self.spans = {device: self.span.to(device) for device in devices}
        self.caches: dict[str, list[LayerKV]] = {}

    def prefill(self, loaded: Loaded) -> None:
        """The model reads all tokens."""
        name, batch = loaded.card["model"], len(self.span.ids)
        self.caches.pop(name, None)  # what comes is in its place, not beside it
        span = self.spans[loaded.model.device]
        _, prefix = read(loaded.model, empty_prefix(loaded.model, batch), span, logits_to_keep=1)
        if name in self.sources:
            self.caches[name] = cache_layers(prefix.cache)

    def carry(self, one: Mapped, system: Handoff) -> None:
        """The mapper makes the target's cache from the source's."""
        span = self.spans[system.target.device]
        system.ferry(system.start(len(span.ids)), span, self.caches[one.source.card["model"]])


def _why_not(one: Mapped, length: int, how: Mapping[str, Any], pace: float) -> str | None:
    """Why a length is not measured; pace: milliseconds a token of the slowest call on the length before, 0 for the first."""
    positions = shared_positions(one)
    if length > positions:
        return f"the models have {positions:,} positions"
    for device, needed in needed_mb(one, length, how["batch"]).items():
        room = how.get("memory_mb") or free_mb(device)
        if needed > room:
            return f"it would take about {needed:,} MB of memory, and {room:,} MB are there"
    seconds = pace * length / 1000
    if seconds > PATIENCE * how["seconds"]:
        return f"one trial would take {seconds:,.0f} s or more, and latency.seconds is {how['seconds']:g}"
    return None


def shared_positions(one: Mapped) -> int | float:
    """The tokens that both models have positions for."""
    return min(positions_of(loaded.model.config) for loaded in (one.source, one.target))


def needed_mb(one: Mapped, length: int, batch: int) -> dict[torch.device, int]:
    """Memory that a length takes on each device beyond the weights, from above for attention that holds no matrix of all scores.

    Both caches, the mapped one twice (before and after it is brought to the target's dtype), and the widest layer's activations
    of either model: gate, up and their product, the residual and its norm, and five tensors of all query heads.
    """
    a_token: Counter[torch.device] = Counter()
    for loaded, copies in ((one.source, 1), (one.target, 3)):
        for device in layer_devices(loaded.model):
            a_token[device] += copies * _layer_bytes(loaded)
    for device in a_token:
        models = [loaded for loaded in (one.source, one.target) if device in devices_of(loaded.model)]
        a_token[device] += max(map(_activation_bytes, models))
    return {device: batch * length * size // MEGABYTE for device, size in a_token.items()}


def _layer_bytes(loaded: Loaded) -> int:
    """Of one token's keys and values in one layer."""
    return 2 * loaded.card["kv_heads"] * loaded.card["head_dim"] * loaded.model.dtype.itemsize


def _activation_bytes(loaded: Loaded) -> int:
    """Of one token in one layer."""
    config, card = loaded.model.config.get_text_config(decoder=True), loaded.card
    wide = 3 * config.intermediate_size + 2 * card["hidden_size"] + 5 * card["query_heads"] * card["head_dim"]
    return wide * loaded.model.dtype.itemsize


def free_mb(device: torch.device) -> int:
    """Memory of the device that nobody uses now."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return free // MEGABYTE
