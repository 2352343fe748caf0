"""What the target gains by computing some tokens itself, and what that costs: at the end of the prefix, or at its start.

`last/count`: the target reads the last `count` prefix tokens (hold_back) and keeps the recipe's own native head. `first/count`:
the target computes the first `count` (native_head) and holds back what the evaluation does. Without anything more, these are
`last/1` and `first/0`. Quality is the next-token KL on the chunks of the perplexity, all points from one source prefill; time
is that of the hand-off up to the last prefix token: the mapper's and that of all the target reads. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvferry.evaluate.clock import Effort, names_of, time_trials
from kvferry.evaluate.kept import keep, missing, publish
from kvferry.evaluate.latency import METRIC, SEED, drawn, shared_positions
from kvferry.evaluate.mapped import Mapped
from kvferry.evaluate.perplexity import METRICS, Cut, measure_chunks
from kvferry.evaluate.setting import Contestant, Outcome, Setting, record_of
from kvferry.kv.cache import LayerKV, cache_layers, devices_of
from kvferry.kv.handoff import Handoff, Native, Prefix, closed, empty_prefix, read
from kvferry.kv.prefill import SourcePrefill, Span
from kvferry.provenance import Stopwatch
from kvferry.records import FIRST, LAST, NATIVE_TOKENS, NATIVE_TOKENS_TIME, NEXT_TOKEN_KL, Item

WARM_UP = 1


@dataclass(frozen=True)
class HeldBack:
    """A hand-off in which the target itself reads the last `count` tokens, the very last of which follow the span.

    The source prefills the whole span whatever `count` is, so that all counts share one prefill; what it has of the tokens that
    the target reads is not used. For spans without padding, after which only `read` comes.
    """

    handoff: Handoff
    count: int

    @property
    def target(self) -> PreTrainedModel:
        """Who reads on."""
        return self.handoff.target

    def start(self, batch: int) -> Prefix:
        """An empty prefix for `batch` prompts."""
        return self.handoff.start(batch)

    def extend(self, prefix: Prefix, span: Span) -> Prefix:
        """Take the span into the prefix; its last count − 1 tokens are read by the target."""
        own, _ = SourcePrefill(self.handoff.source, self.handoff.memory).extend(prefix.texts, span)
        return self.take(prefix, span, own, span.ids.shape[1] - (self.count - 1))

    def take(self, prefix: Prefix, span: Span, own: list[LayerKV], ferried: int) -> Prefix:
        """The first `ferried` tokens of the span come through the mapper, the target reads the others, at once.

        own: the source's keys and values `[batch, kv_heads, tokens, head_dim]` of as many tokens or more.
        """
        ferried = max(ferried, 0)
        if ferried:
            mine = [(keys[:, :, :ferried], values[:, :, :ferried]) for keys, values in own]
            prefix = self.handoff.ferry(prefix, Span(span.ids[:, :ferried], span.mask[:, :ferried]), mine)
        if ferried < span.ids.shape[1]:
            rest = Span(span.ids[:, ferried:], span.mask[:, ferried:])
            prefix = read(self.target, prefix, rest, logits_to_keep=1)[1]
        return closed(prefix)


def run_native_tokens(setting: Setting, mappers: Sequence[Mapped]) -> None:
    """Measure quality and time by number of native tokens; mappers of one pair, whose target is the setting's.

    Writes a NATIVE_TOKENS and a NATIVE_TOKENS_TIME record each. The config's `native_tokens`: counts, length, trials.

    Raises:
        KvferryError: a mapper is unreadable or was fitted for other models.
    """
    how = setting.config[NATIVE_TOKENS]
    timed = {name: how[name] for name in ("counts", "length", "trials")}
    timed |= {"threads": torch.get_num_threads(), "device_name": names_of(mappers[0].devices)}
    entries = [
        (
            one,
            _asked(one, NATIVE_TOKENS, native_tokens=list(how["counts"])),
            _asked(one, NATIVE_TOKENS_TIME, native_tokens=timed),
        )
        for one in mappers
    ]
    _measure(setting, [(one, who) for one, who, _ in entries if missing(who, setting, [NATIVE_TOKENS])])
    for one, _, who in entries:
        if missing(who, setting, [NATIVE_TOKENS_TIME]):
            _time(setting, one, who, timed)
    for _, *everyone in entries:
        for who in everyone:
            publish(who, setting)


def _asked(one: Mapped, name: str, **deciding: Any) -> Contestant:
    """The contestant that is asked for one record alone: what decides it does not decide the other."""
    return replace(one, outputs={name: one.outputs[name]}).contestant(**deciding)


def points(handoff: Handoff, hold_back: int, counts: Sequence[int]) -> dict[str, HeldBack]:
    """Every point of both curves by `{last|first}/{count}`; hold_back: what the evaluation holds back."""
    last = {f"{LAST}/{count}": HeldBack(handoff, count) for count in sorted({1, *counts})}
    first = {
        f"{FIRST}/{count}": HeldBack(replace(handoff, native_head=count), hold_back) for count in sorted({0, *counts})
    }
    return last | first


def distinct(curves: Mapping[str, HeldBack]) -> tuple[dict[str, HeldBack], dict[str, str]]:
    """The points that differ, and for each point the one it equals: what both curves have in common is measured once."""
    seen: dict[tuple[int, int], str] = {}
    same = {name: seen.setdefault((own.handoff.native_head, own.count), name) for name, own in curves.items()}
    return {name: curves[name] for name in seen.values()}, same


def _measure(setting: Setting, due: Sequence[tuple[Mapped, Contestant]]) -> None:
    """The KL of all points of these mappers, in one pass over the chunks."""
    if not due:
        return
    watch, how, evaluation = Stopwatch(), setting.config["perplexity"], setting.evaluation
    systems: dict[str, HeldBack] = {}
    same_as: list[dict[str, str]] = []
    for number, (one, _) in enumerate(due):
        own, same = distinct(
            points(one.handoff(setting.memory), evaluation["hold_back"], setting.config[NATIVE_TOKENS]["counts"])
        )
        systems |= {f"{number}:{name}": point for name, point in own.items()}
        same_as.append({name: f"{number}:{other}" for name, other in same.items()})
    # One token follows what `extend` is given: the last of the prefix, which every point holds back.
    found = measure_chunks(Native(setting.target.model), systems, setting.chunks, Cut(how["prefix"], 1), setting.memory)
    facts = {"prefix": how["prefix"], "scored": how["scored"], "chunks": len(setting.chunks)}
    for (_, who), same in zip(due, same_as, strict=True):
        items = [
            replace(item, id=f"{name}/{item.id}")
            for name, system in same.items()
            for item in found[system][NEXT_TOKEN_KL]
        ]
        told = facts | {"items_total": len(items)}
        origin = {"origin": how["corpus"], "tokens_sha256": setting.chunks_id}
        seconds = watch.seconds() / len(due)
        outcome = Outcome(NATIVE_TOKENS, METRICS[NEXT_TOKEN_KL], items, seconds, told, origin, how["seed"])
        keep(who, setting, record_of(who, setting, outcome))


def _time(setting: Setting, one: Mapped, who: Contestant, timed: Mapping[str, Any]) -> None:
    """The time of all points of a mapper, in the same rounds."""
    watch, length = Stopwatch(), min(timed["length"], shared_positions(one))
    curves = points(one.handoff(), setting.evaluation["hold_back"], timed["counts"])
    own, same = distinct(curves)
    times = time_points(own, length, Effort(WARM_UP, timed["trials"]))
    items = [
        Item(f"{name}/{number}", value) for name, other in same.items() for number, value in enumerate(times[other])
    ]
    facts = {**timed, "length": length, "warm_up": WARM_UP, "batch": 1, "items_total": len(items)}
    origin = {"origin": "tokens drawn at random"}
    keep(
        who,
        setting,
        record_of(who, setting, Outcome(NATIVE_TOKENS_TIME, METRIC, items, watch.seconds(), facts, origin, SEED)),
    )


@torch.inference_mode()
def time_points(curves: Mapping[str, HeldBack], length: int, effort: Effort) -> dict[str, list[float]]:
    """Milliseconds of each hand-off of `length` drawn tokens, trial by trial; the source's prefill is not in them."""
    handoff = next(iter(curves.values())).handoff
    vocabulary = min(model.get_input_embeddings().num_embeddings for model in (handoff.source, handoff.target))
    ids = drawn(1, length, vocabulary).to(handoff.target.device)
    span = Span(ids, torch.ones_like(ids))
    given = span.to(handoff.source.device)
    _, prefilled = read(handoff.source, empty_prefix(handoff.source, 1), given, logits_to_keep=1)
    own = cache_layers(prefilled.cache)
    calls = {
        name: lambda point=point: point.take(point.start(1), span, own, length - point.count)
        for name, point in curves.items()
    }
    return time_trials(calls, devices_of(handoff.source, handoff.target), effort)
