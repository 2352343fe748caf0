"""Figures: `FIGURES` draws each one that is made from results alone; figures 2 and 5 are drawn from frames of their own.

Knows which figures there are; which of them a config gives is said by `kvferry.report.wanted`. Does not know where they
are written or what calls them.
"""

from collections.abc import Callable
from pathlib import Path

from kvferry.report.figures.components import fig7_component_removal
from kvferry.report.figures.coqa import fig4_coqa_drift
from kvferry.report.figures.correlation import fig10_correlation
from kvferry.report.figures.greedy import fig5_greedy_r2
from kvferry.report.figures.heatmap import fig2_r2_heatmap
from kvferry.report.figures.latency import fig9_latency
from kvferry.report.figures.layers import fig6_accuracy_vs_k
from kvferry.report.figures.native_tokens import fig11_native_tokens
from kvferry.report.figures.retention import fig8_retention
from kvferry.report.figures.schematics import fig1_pipeline, fig3_mapper
from kvferry.report.inputs import Results

FIGURES: dict[str, Callable[[Results, Path], None]] = {
    own.__name__: own
    for own in (
        fig1_pipeline,
        fig3_mapper,
        fig4_coqa_drift,
        fig6_accuracy_vs_k,
        fig7_component_removal,
        fig8_retention,
        fig9_latency,
        fig10_correlation,
        fig11_native_tokens,
    )
}

__all__ = ["FIGURES", "fig2_r2_heatmap", "fig5_greedy_r2"]
