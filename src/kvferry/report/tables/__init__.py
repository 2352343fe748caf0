"""Tables: `TABLES` makes each one as a frame, `write_table` writes a frame as csv, markdown and LaTeX.

Knows which tables there are; which of them a config gives is said by `kvferry.report.wanted`. Does not know where they
are written or what calls them.
"""

from collections.abc import Callable

import pandas as pd

from kvferry.report.inputs import Results
from kvferry.report.tables.ablation import table2_ablation
from kvferry.report.tables.accuracy import table11_benchmarks, table13_accuracy
from kvferry.report.tables.calibration import table8_calibration, table9_domain
from kvferry.report.tables.geometry import table10_pairs, table12_size
from kvferry.report.tables.improved import improved
from kvferry.report.tables.layers import table7_r2_vs_k, table17_loo_k
from kvferry.report.tables.mlp import table3_mlp
from kvferry.report.tables.render import write_table
from kvferry.report.tables.transfer import gap_recovered, table1_retention, table15_floor_normalised

TABLES: dict[str, Callable[[Results], pd.DataFrame]] = {
    "table1_retention": table1_retention,
    "table2_ablation": table2_ablation,
    "table3_mlp": table3_mlp,
    "table7_r2_vs_k": table7_r2_vs_k,
    "table8_calibration": table8_calibration,
    "table9_domain": table9_domain,
    "table10_pairs": table10_pairs,
    "table11_benchmarks": table11_benchmarks,
    "table12_size": table12_size,
    "table13_accuracy": table13_accuracy,
    "table15_floor_normalised": table15_floor_normalised,
    "table17_loo_k": table17_loo_k,
    "gap_recovered": gap_recovered,
    "improved": improved,
}

__all__ = ["TABLES", "write_table"]
