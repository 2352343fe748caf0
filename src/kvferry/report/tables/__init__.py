"""Tables: `TABLES` makes each one as a frame, `write_table` writes a frame as csv, markdown and LaTeX.

Knows which tables there are; which of them a config gives is said by `kvferry.report.wanted`. Does not know where they
are written or what calls them.
"""

from collections.abc import Callable

import pandas as pd

from kvferry.report.inputs import Results
from kvferry.report.tables.ablation import table2_ablation
from kvferry.report.tables.accuracy import table11_benchmarks, table13_accuracy
from kvferry.report.tables.anchors import table14_anchors
from kvferry.report.tables.calibration import table8_calibration, table9_domain
from kvferry.report.tables.choice import k_choice
from kvferry.report.tables.controls import controls
from kvferry.report.tables.coqa import coqa_drift
from kvferry.report.tables.diagnostics import correlations, diagnostics_by_layer, table4_error_placement
from kvferry.report.tables.geometry import table10_pairs, table12_size
from kvferry.report.tables.held_out import table18_held_out
from kvferry.report.tables.improved import improved
from kvferry.report.tables.layers import table7_r2_vs_k, table17_loo_k
from kvferry.report.tables.methods import table6_methods
from kvferry.report.tables.mlp import table3_mlp
from kvferry.report.tables.provenance import provenance
from kvferry.report.tables.render import write_table
from kvferry.report.tables.reproduction import reproduction
from kvferry.report.tables.speed import native_tokens, table5_latency, table16_latency_range
from kvferry.report.tables.transfer import gap_recovered, table1_retention, table15_floor_normalised
from kvferry.report.tables.verdict import verdict

TABLES: dict[str, Callable[[Results], pd.DataFrame]] = {
    own.__name__: own
    for own in (
        table1_retention,
        table2_ablation,
        table3_mlp,
        table4_error_placement,
        table5_latency,
        table6_methods,
        table7_r2_vs_k,
        table8_calibration,
        table9_domain,
        table10_pairs,
        table11_benchmarks,
        table12_size,
        table13_accuracy,
        table14_anchors,
        table15_floor_normalised,
        table16_latency_range,
        table17_loo_k,
        table18_held_out,
        gap_recovered,
        improved,
        k_choice,
        controls,
        correlations,
        diagnostics_by_layer,
        coqa_drift,
        native_tokens,
        verdict,
        reproduction,
        provenance,
    )
}

__all__ = ["TABLES", "write_table"]
