"""Time of the hand-off and of the target's own prefill against length. Knows speeds; leaves the look to `style`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvferry.errors import KvferryError
from kvferry.records import LATENCY, Record
from kvferry.report import style
from kvferry.report.inputs import Results
from kvferry.report.speed import COLD, WARM, cold_ms, of_kind, pays_from, speeds
from kvferry.report.tables.cells import HIGH, LOW, Row, frame_of
from kvferry.report.tables.speed import times

PANELS_A_LINE = 3
# Both ways of the hand-off have one colour: what differs is whether the source's prefill is counted.
CURVES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "target_prefill_ms": ("re-prefill by the target", style.SYSTEMS[style.TARGET]),
    "cold_ms": ("source prefill + mapper (cold)", style.SYSTEMS[style.TRANSFER] | {"linestyle": ":", "marker": "v"}),
    "mapper_ms": ("mapper (warm)", style.SYSTEMS[style.TRANSFER]),
}


def fig9_latency(results: Results, stem: Path) -> None:
    """A panel for each pair and variant: milliseconds against tokens, both axes logarithmic, bands from 10 to 90 % of trials.

    Raises:
        KvferryError: no latency was measured, or a record is broken.
    """
    drawn = latency_curves(results)
    groups = list(drawn.groupby(["pair", "system"], sort=False))
    lines = math.ceil(len(groups) / PANELS_A_LINE)
    across = math.ceil(len(groups) / lines)
    with style.house_style():
        figure = Figure(figsize=(0.8 + 2.8 * max(across, 2), 0.9 + 2.6 * lines), layout="constrained")
        axes = figure.subplots(lines, across, squeeze=False, sharex=True, sharey=True).ravel()
        for ax, ((pair, variant), rows) in zip(axes, groups, strict=False):
            _panel(ax, rows, f"{pair}, {variant}", results.transfers[pair, variant, LATENCY])
        for ax in axes[len(groups) :]:
            ax.set_axis_off()
        style.legend_below(figure, _legend(), 3)
        style.entitle(figure, f"Median and 10 to 90 % of {style.span(drawn['trials'])} trials; {_conditions(results)}")
        style.save(figure, drawn, stem)


def latency_curves(results: Results) -> pd.DataFrame:
    """What figure 9 draws: a row for each pair, variant and length.

    Raises:
        KvferryError: no length of any pair was measured, or a record is broken.
    """
    rows: list[Row] = []
    for pair, variant, record in of_kind(results, LATENCY):
        together = cold_ms(record)
        for own in speeds(record):
            row: Row = {"pair": pair.name, "system": variant, "tokens": own.length, "trials": own.trials}
            row |= times("target_prefill_ms", own.target_prefill_ms) | times("cold_ms", together[own.length])
            rows.append(row | times("mapper_ms", own.mapper_ms) | {WARM: own.warm, COLD: own.cold})
    if not rows:
        raise KvferryError(
            f"fig9_latency: no latency was measured; add the section {LATENCY} to the config and run again"
        )
    return frame_of(rows)


def _panel(ax: Axes, rows: pd.DataFrame, title: str, record: Record) -> None:
    tokens = rows["tokens"].to_numpy(dtype=float)
    for name, (_, look) in CURVES.items():
        low, high = (rows[name + suffix].to_numpy(dtype=float) for suffix in (LOW, HIGH))
        ax.fill_between(tokens, low, high, facecolor=look["color"], alpha=0.15, linewidth=0)
        ax.plot(tokens, rows[name].to_numpy(dtype=float), linewidth=1.2, markersize=3.5, **look)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = [int(count) for count in tokens]
    ax.set_xticks(ticks, [f"{count:,}" for count in ticks], rotation=45, fontsize=7)
    ax.minorticks_off()
    ax.set_xlabel("tokens (log axis)")
    ax.set_ylabel("ms (log axis)")
    measured = speeds(record)
    ax.set_title(f"{title}\n" + "; ".join(_pays(way, pays_from(measured, way)) for way in (WARM, COLD)))


def _pays(way: str, length: int | None) -> str:
    return f"{way} pays at none" if length is None else f"{way} pays from {length:,} tokens"


def _conditions(results: Results) -> str:
    """On what it was measured, as far as all records say the same."""
    told = [record.settings for _, _, record in of_kind(results, LATENCY)]
    parts = {
        "device_name": "{}",
        "threads": "{} thread(s)",
        "dtype": "{}",
        "batch": "batch {}",
    }
    if str(told[0].get("device", "")) != "cpu":
        parts.pop("threads")
    return ", ".join(_same(told, name, pattern) for name, pattern in parts.items() if _same(told, name, pattern))


def _same(told: Sequence[Mapping[str, Any]], name: str, pattern: str) -> str:
    values = {str(settings.get(name, "")) for settings in told}
    return pattern.format(values.pop()) if len(values) == 1 and "" not in values else ""


def _legend() -> list[Artist]:
    return [Line2D([], [], linewidth=1.2, markersize=3.5, label=label, **look) for label, look in CURVES.values()]
