"""Drift over the turns of CoQA's conversations: how far a mapped cache falls behind the model that answers, turn by turn.

Drift at a turn = F1 of the model that answers it, on its own, less F1 with the mapped cache (the paper, Figure 4): that model is
the target in `handoff`; in `alternate` the source at odd turns and the target at even ones. The unit that is resampled is the
conversation with all its turns (cluster bootstrap): turns of one conversation share a story and a cache. Every quantity here
is a mean over conversations of something linear in their scores, so all draws are paired. Does not know how a figure looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.errors import KvferryError
from kvferry.records import COQA, COQA_ALTERNATE, COQA_HANDOFF
from kvferry.report.compare import seed_of
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.items import TARGET, aligned_scores, record_of
from kvferry.report.stats import Quantity, Sampled, Undefined, bootstrap_means

HANDOFF, ALTERNATE = "handoff", "alternate"
RECORDS = {HANDOFF: COQA_HANDOFF, ALTERNATE: COQA_ALTERNATE}
ANSWERING, CHOSEN = "answering model alone", "chosen on other conversations"


@dataclass(frozen=True, eq=False)
class Line:
    """A system's F1 and what it is compared with, both `[conversations, turns]`; no reference for a model on its own.

    variants: the mapper behind it, or the two that were chosen, for the conversations of odd and of even number.
    first: number, from 0, of the first turn at which something mapped is read; 1 in `alternate`, which the source opens.
    """

    system: str
    scores: np.ndarray
    reference: np.ndarray | None = None
    variants: tuple[str, ...] = ()
    first: int = 0


def coqa_pairs(results: Results) -> list[Pair]:
    """The pairs that answered CoQA, in the order of the report."""
    return [pair for pair in results.pairs if pair.name in results.dialogues]


def protocols_of(results: Results, pair: Pair) -> list[str]:
    """The protocols that the pair's variants were asked for: `handoff`, and `alternate` if any of them has its record."""
    alternates = any((pair.name, name, COQA_ALTERNATE) in results.transfers for name in results.dialogues[pair.name])
    return [HANDOFF, ALTERNATE] if alternates else [HANDOFF]


def lines(results: Results, pair: Pair, protocol: str) -> list[Line]:
    """Target and source on their own, the model that answers (`alternate`), variants asked for it, and the cross-fitted choice.

    The source's reference is the target, whatever the protocol.

    Raises:
        KvferryError: a record is missing or of other items, one conversation has other turns than another, or there are
            fewer than two conversations to choose on.
    """
    variants = results.dialogues[pair.name]
    if protocol == ALTERNATE:
        variants = [name for name in variants if (pair.name, name, COQA_ALTERNATE) in results.transfers]
    named = [record_of(results, pair, name, COQA) for name in (TARGET, SOURCE)]
    named += [record_of(results, pair, name, RECORDS[protocol]) for name in variants]
    compared = frozenset(item.id for item in named[-1][1].items)
    rows, _ = aligned_scores(named, compared)
    shape = _shape(named[0][0], [item.id for item in named[0][1].items if item.id in compared])
    target, source, *mapped = (row.reshape(shape) for row in rows)
    if protocol == HANDOFF:
        reference, answering, first = target, [], 0
    else:
        reference = np.where(np.arange(shape[1]) % 2 == 0, source, target)
        answering, first = [Line(ANSWERING, reference)], 1
    own = [Line(name, scores, reference, (name,), first) for name, scores in zip(variants, mapped, strict=True)]
    return [Line(TARGET, target), Line(SOURCE, source, target), *answering, *own, cross_fitted(own)]


def _shape(place: str, ids: Sequence[str]) -> tuple[int, int]:
    """Conversations and turns of ids `conversation/turn`, a conversation after another, turns in order from 1."""
    turns = max(int(name.rpartition("/")[2]) for name in ids)
    names = list(dict.fromkeys(name.rpartition("/")[0] for name in ids))
    if list(ids) != [f"{name}/{turn}" for name in names for turn in range(1, turns + 1)]:
        raise KvferryError(
            f"{place}: its conversations do not all have the turns 1 to {turns}; delete it and run again"
        )
    return len(names), turns


def cross_fitted(variants: Sequence[Line]) -> Line:
    """On each half of the conversations the variant with the best mean F1 on the other half; equal ones: the first named.

    The halves are every other conversation in the order of the draw, so each has all domains. No conversation has a say in
    the choice that it is reported with. The draws of an interval keep the choice as it is.

    Raises:
        KvferryError: there is but one conversation.
    """
    first = variants[0]
    if len(first.scores) < 2:
        raise KvferryError("coqa.conversations: choosing on half of them needs at least two; set a larger number")
    scores, names = np.empty_like(first.scores), []
    for half in (0, 1):
        best = max(variants, key=lambda line: float(line.scores[1 - half :: 2].mean()))
        scores[half::2] = best.scores[half::2]
        names.append(best.system)
    return replace(first, system=CHOSEN, scores=scores, variants=tuple(names))


def f1_by_turn(results: Results, line: Line) -> list[Sampled]:
    """Mean F1 at each turn, a fraction."""
    return _means(results, line.scores.T)


def drift_by_turn(results: Results, line: Line) -> list[Sampled] | None:
    """Mean drift at each turn, a fraction; None without a reference."""
    return None if line.reference is None else _means(results, (line.reference - line.scores).T)


@dataclass(frozen=True, eq=False)
class Summary:
    """Fractions: mean F1 and mean drift over all turns, and the least-squares slope of drift a turn; None without a reference.

    The slope leaves out a turn before which nothing was mapped: its drift is 0, and the step from it is no slope.
    """

    f1: Sampled
    drift: Sampled | None = None
    slope: Quantity | None = None


def summary(results: Results, line: Line) -> Summary:
    """Means over turns and the slope, with draws over conversations."""
    (f1,) = _means(results, line.scores.mean(1)[None])
    if line.reference is None:
        return Summary(f1)
    behind = line.reference - line.scores
    (drift,) = _means(results, behind.mean(1)[None])
    if behind.shape[1] - line.first < 2:
        return Summary(f1, drift, Undefined("fewer than two turns with a mapped cache have no slope"))
    (slope,) = _means(results, (behind @ slope_weights(behind.shape[1], line.first))[None])
    return Summary(f1, drift, slope)


def slope_weights(turns: int, first: int = 0) -> np.ndarray:
    """Weights `[turns]` whose sum with scores is their least-squares slope a turn from turn `first` on: (t − t̄)/Σ(t − t̄)²."""
    centred = np.arange(turns) - (first + turns - 1) / 2
    centred[:first] = 0
    return centred / np.square(centred).sum()


def _means(results: Results, scores: np.ndarray) -> list[Sampled]:
    """Means over conversations of rows `[rows, conversations]`; equal resamples for every call with as many conversations."""
    return bootstrap_means(scores, np.ones(scores.shape[1]), results.draws, seed_of(results, COQA))


def choice_of(line: Line) -> str | None:
    """The variants of a cross-fitted line in words."""
    if line.system != CHOSEN:
        return None
    return " / ".join(dict.fromkeys(line.variants))


def headline_of(results: Results, pair: Pair, found: Mapping[str, Line]) -> Line:
    """The line of the single-turn variant.

    Raises:
        KvferryError: it was not asked for CoQA.
    """
    headline = results.headline(pair)
    if headline not in found:
        raise KvferryError(f"coqa.variants: {pair.name} lacks the headline {headline}; add it to the list")
    return found[headline]
