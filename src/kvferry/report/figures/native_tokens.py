"""Quality and cost against the number of tokens that the target computes itself. Knows points; leaves the look to `style`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvferry.errors import KvferryError
from kvferry.records import FIRST, LAST, NATIVE_TOKENS, NEXT_TOKEN_KL
from kvferry.report import native_tokens as native
from kvferry.report import style
from kvferry.report.inputs import Results
from kvferry.report.tables.cells import HIGH, LOW, N, Row, cells, frame_of
from kvferry.report.tables.speed import times

CURVES = {
    LAST: ("at the end (hold_back)", {"color": style.OKABE_ITO["vermillion"], "marker": "s", "linestyle": "--"}),
    FIRST: ("at the start (native_head)", {"color": style.OKABE_ITO["blue"], "marker": "o", "linestyle": "-"}),
}


def fig11_native_tokens(results: Results, stem: Path) -> None:
    """A line of panels for each pair and variant: next-token KL, and added ms, against the number of native tokens.

    Bands: 95 % over chunks (bootstrap) for KL, 10 to 90 % of trials for time.

    Raises:
        KvferryError: nothing was measured, or a record is broken.
    """
    drawn = native_curves(results)
    groups = list(drawn.groupby(["pair", "system"], sort=False))
    with style.house_style():
        figure = Figure(figsize=(6.6, 0.9 + 2.5 * len(groups)), layout="constrained")
        axes = figure.subplots(len(groups), 2, squeeze=False)
        for (left, right), ((pair, variant), rows) in zip(axes, groups, strict=True):
            _panel(left, rows, NEXT_TOKEN_KL, f"{pair}, {variant} (n = {style.span(rows[NEXT_TOKEN_KL + N])} chunks)")
            left.set_ylabel("next-token KL, nats per token")
            left.set_ylim(bottom=0)
            base = rows.loc[rows["native_at"] == LAST, "handoff_ms"].iloc[0]
            title = (
                f"{style.span(rows['tokens'])} tokens, {base:.0f} ms without (n = {style.span(rows['trials'])} trials)"
            )
            _panel(right, rows, "added_ms", title)
            right.set_ylabel("added to the hand-off, ms")
        style.legend_below(figure, _legend(), 2)
        bands = f"95 % bootstrap over chunks ({results.draws:,} resamples) for KL, 10 to 90 % of trials for time"
        style.entitle(figure, f"Tokens that the target computes itself. Bands: {bands}")
        style.save(figure, drawn, stem)


def native_curves(results: Results) -> pd.DataFrame:
    """What figure 11 draws: a row for each pair, variant and point.

    Raises:
        KvferryError: nothing was measured, or a record is broken.
    """
    rows: list[Row] = []
    for pair, variant, points, length in native.measured(results):
        for point in points:
            row: Row = {"pair": pair.name, "system": variant, "native_at": point.where, "native_count": point.count}
            kl = cells(NEXT_TOKEN_KL, point.kl, scale=1)
            row |= {name: value for name, value in kl.items() if value is not None} | {NEXT_TOKEN_KL + N: point.chunks}
            row |= times("handoff_ms", point.ms)
            rows.append(row | times("added_ms", point.added_ms) | {"tokens": length, "trials": point.trials})
    if not rows:
        raise KvferryError(
            f"fig11_native_tokens: nothing was measured; add the section {NATIVE_TOKENS} to the config and run again"
        )
    return frame_of(rows)


def _panel(ax: Axes, rows: pd.DataFrame, name: str, title: str) -> None:
    counts = sorted({int(count) for count in rows["native_count"]})
    for where, (_, look) in CURVES.items():
        own = rows[rows["native_at"] == where]
        # 0 has no place on a logarithmic axis: counts stand one step apart
        places = [counts.index(int(count)) for count in own["native_count"]]
        low, high, value = (own[name + suffix].to_numpy(dtype=float) for suffix in (LOW, HIGH, ""))
        ax.fill_between(places, low, high, facecolor=look["color"], alpha=0.15, linewidth=0)
        ax.plot(places, value, linewidth=1.2, markersize=4, **look)
    ax.set_xticks(range(len(counts)), [str(count) for count in counts])
    ax.set_xlabel("native tokens (steps are not even)")
    ax.set_title(title)


def _legend() -> list[Line2D]:
    return [Line2D([], [], linewidth=1.2, markersize=4, label=label, **look) for label, look in CURVES.values()]
