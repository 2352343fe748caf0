"""Tables: `TABLES` makes each one as a frame, `write_table` writes a frame as csv, markdown and LaTeX.

Knows which tables there are. Does not know where they are written or what calls them.
"""

from collections.abc import Callable

import pandas as pd

from kvferry.report.inputs import Results
from kvferry.report.tables.accuracy import table11_benchmarks, table13_accuracy
from kvferry.report.tables.geometry import table10_pairs, table12_size
from kvferry.report.tables.render import write_table
from kvferry.report.tables.transfer import gap_recovered, table1_retention, table15_floor_normalised

TABLES: dict[str, Callable[[Results], pd.DataFrame]] = {
    "table1_retention": table1_retention,
    "table10_pairs": table10_pairs,
    "table11_benchmarks": table11_benchmarks,
    "table12_size": table12_size,
    "table13_accuracy": table13_accuracy,
    "table15_floor_normalised": table15_floor_normalised,
    "gap_recovered": gap_recovered,
}

__all__ = ["TABLES", "write_table"]
