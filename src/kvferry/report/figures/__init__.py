"""Figures: `FIGURES` draws each one that is made from results alone; figures 2 and 5 are drawn from frames of their own.

Knows which figures there are; which of them a config gives is said by `kvferry.report.wanted`. Does not know where they
are written or what calls them.
"""

from collections.abc import Callable
from pathlib import Path

from kvferry.report.figures.components import fig7_component_removal
from kvferry.report.figures.greedy import fig5_greedy_r2
from kvferry.report.figures.heatmap import fig2_r2_heatmap
from kvferry.report.figures.layers import fig6_accuracy_vs_k
from kvferry.report.figures.retention import fig8_retention
from kvferry.report.inputs import Results

FIGURES: dict[str, Callable[[Results, Path], None]] = {
    "fig6_accuracy_vs_k": fig6_accuracy_vs_k,
    "fig7_component_removal": fig7_component_removal,
    "fig8_retention": fig8_retention,
}

__all__ = ["FIGURES", "fig2_r2_heatmap", "fig5_greedy_r2"]
