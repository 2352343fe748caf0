"""Curves of CoQA's F1 over the turns of a conversation. Knows lines of drift; leaves the look to `style`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvferry.errors import KvferryError
from kvferry.report import style
from kvferry.report.drift import (
    ALTERNATE,
    CHOSEN,
    HANDOFF,
    Line,
    choice_of,
    coqa_pairs,
    drift_by_turn,
    f1_by_turn,
    headline_of,
    lines,
    protocols_of,
)
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.items import TARGET
from kvferry.report.tables.cells import HIGH, LOW, N, Row, cells, empty, frame_of

SINGLE = "single-turn variant"
# As in the paper's figure 4: the target is the solid line here, and what is mapped is broken.
LOOKS: dict[str, dict[str, str]] = {
    TARGET: {"color": style.OKABE_ITO["black"], "linestyle": "-", "marker": "o"},
    SOURCE: {"color": "0.5", "linestyle": ":", "marker": "s"},
    SINGLE: {"color": style.OKABE_ITO["blue"], "linestyle": "--", "marker": ""},
    CHOSEN: {"color": style.OKABE_ITO["vermillion"], "linestyle": "-.", "marker": ""},
}
BANDS = (TARGET, SINGLE)
WORDS = {
    HANDOFF: "handoff: the target answers every turn",
    ALTERNATE: "alternate: source and target answer in turn",
}


def fig4_coqa_drift(results: Results, stem: Path) -> None:
    """F1 by turn: a column of panels a direction, a row a protocol; target, source, single-turn variant, cross-fitted choice.

    Markers on the lines of target and source show who answers a turn, which is what the mapped lines are to be compared with.

    Raises:
        KvferryError: no pair answered CoQA, or as `drift.lines`.
    """
    drawn = curves(results)
    pairs, protocols = (list(dict.fromkeys(drawn[name])) for name in ("pair", "protocol"))
    size = (0.6 + 3.4 * len(pairs), 1.6 + 2.4 * len(protocols))
    with style.house_style():
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(protocols), len(pairs), squeeze=False, sharey=True, sharex=True)
        for row, protocol in zip(axes, protocols, strict=True):
            for ax, pair in zip(row, pairs, strict=True):
                _panel(ax, drawn[(drawn["pair"] == pair) & (drawn["protocol"] == protocol)], pair, protocol)
            row[0].set_ylabel("F1, %")
        for ax in axes[-1]:
            ax.set_xlabel("turn of the conversation")
        axes[0][0].set_ylim(0, 1.05 * float(drawn[["f1", "f1" + HIGH]].astype(float).max(axis=None)))
        style.legend_below(figure, _legend(results), min(len(pairs), 2))
        style.entitle(figure, _title(results))
        style.save(figure, drawn, stem)


def curves(results: Results) -> pd.DataFrame:
    """What figure 4 draws: a row a (pair, protocol, system, turn) with F1 in percent and drift in points.

    Raises:
        KvferryError: no pair answers CoQA.
    """
    pairs = coqa_pairs(results)
    if not pairs:
        raise KvferryError("fig4_coqa_drift: no pair of this configuration answers CoQA; name some in coqa.pairs")
    return frame_of(
        [row for pair in pairs for protocol in protocols_of(results, pair) for row in _rows(results, pair, protocol)]
    )


def _rows(results: Results, pair: Pair, protocol: str) -> list[Row]:
    found = {line.system: line for line in lines(results, pair, protocol)}
    shown = {name: found[name] for name in (TARGET, SOURCE)}
    shown |= {SINGLE: headline_of(results, pair, found), CHOSEN: found[CHOSEN]}
    return [
        {"pair": pair.name, "protocol": protocol, "system": role} | row
        for role, line in shown.items()
        for row in _turns(results, line, protocol)
    ]


def _turns(results: Results, line: Line, protocol: str) -> list[Row]:
    drift = drift_by_turn(results, line)
    variant = choice_of(line) or "".join(line.variants) or None
    return [
        {"variant": variant, "turn": number + 1, "answers": _who(number, protocol), "f1" + N: len(line.scores)}
        | cells("f1", own)
        | (empty("drift") if drift is None else cells("drift", drift[number]))
        for number, own in enumerate(f1_by_turn(results, line))
    ]


def _who(number: int, protocol: str) -> str:
    """Who answers the turn with this number from 0."""
    return SOURCE if protocol == ALTERNATE and number % 2 == 0 else TARGET


def _panel(ax: Axes, drawn: pd.DataFrame, pair: str, protocol: str) -> None:
    if drawn.empty:
        ax.set_axis_off()
        return
    for role, look in LOOKS.items():
        rows = drawn[drawn["system"] == role]
        turns, value, low, high = (rows[name].to_numpy(dtype=float) for name in ("turn", "f1", "f1" + LOW, "f1" + HIGH))
        if role in BANDS:
            ax.fill_between(turns, low, high, facecolor=look["color"], alpha=0.1, linewidth=0)
        answered = np.flatnonzero((rows["answers"] == role).to_numpy())
        ax.plot(turns, value, linewidth=1.3, markersize=4, markevery=answered.tolist(), **look)
    chosen = drawn.loc[drawn["system"] == CHOSEN, "variant"].iloc[0]
    n = style.span(drawn["f1" + N])
    ax.set_title(f"{pair} (n = {n} conversations)\n{WORDS[protocol]}\nchosen: {chosen}")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(results: Results) -> Sequence[Artist]:
    labels = {
        TARGET: "target alone; markers: turns it answers",
        SOURCE: "source alone; markers: turns it answers",
        SINGLE: f"mapped, single-turn variant {results.headline_names}",
        CHOSEN: "mapped, variant chosen by F1 on the other half",
    }
    return [Line2D([], [], linewidth=1.3, markersize=4, label=labels[role], **look) for role, look in LOOKS.items()]


def _title(results: Results) -> str:
    return (
        "CoQA by turn, history of gold answers; bands (target, single-turn variant): 95 % bootstrap over conversations, "
        f"{results.draws:,} resamples"
    )
