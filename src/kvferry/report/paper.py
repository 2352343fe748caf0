"""The paper's numbers, read from one csv a table. Knows their places and columns; does not know our results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvferry.errors import KvferryError
from kvferry.records import PERPLEXITY
from kvferry.report.wanted import FIVE

PAPER_ROOT = Path(__file__).resolve().parents[3] / "resources" / "paper"
ABLATED = "Qwen3 14B→32B"  # the pair of tables that do not name one: 2 and 9


class Paper:
    """Look-ups by the name of a pair as the paper writes it; percentages mostly, None where not stated."""

    def __init__(self, root: Path = PAPER_ROOT) -> None:
        self.root = root
        self._tables: dict[str, pd.DataFrame] = {}

    def table(self, name: str) -> pd.DataFrame:
        """The table `name` (such as `table1`), indexed by its first column.

        Raises:
            KvferryError: there is no such csv, or it is not one.
        """
        if name not in self._tables:
            self._tables[name] = _read(self.root / f"{name}.csv")
        return self._tables[name]

    def value(self, table: str, row: str, column: str) -> float | None:
        """One number, or None when the cell is empty or the table has no such row or column."""
        cell = self._cell(table, row, column)
        return None if cell is None else float(cell)

    def words(self, table: str, row: str, column: str) -> str | None:
        """One cell as it is written, None as in `value`."""
        cell = self._cell(table, row, column)
        return None if cell is None else str(cell)

    def _cell(self, table: str, row: str, column: str) -> Any:
        frame = self.table(table)
        if row not in frame.index or column not in frame.columns or pd.isna(frame.loc[row, column]):
            return None
        return frame.loc[row, column]

    def where(self, table: str, column: str, **wanted: object) -> float | None:
        """One number of the first row whose columns are as wanted, words in any case; None where there is none."""
        frame = self.table(table).reset_index()
        for name, value in wanted.items():
            frame = frame[[same(cell, value) for cell in frame[name]]]
        return None if frame.empty or column not in frame else _number(frame[column].iloc[0])

    def k(self, pair: str) -> float | None:
        """The number of source layers that the paper chose for a pair, in either direction; None where it is not stated."""
        return self.value("pairs", pair, "k")

    def models(self, pair: str) -> tuple[str, str]:
        """Names of the source and the target of a pair, in either direction.

        Raises:
            KvferryError: the paper has no such pair.
        """
        frame = self.table("pairs")
        if pair not in frame.index:
            raise KvferryError(
                f"config/pairs.yaml: the paper has no pair {pair!r}; use one of {', '.join(frame.index)}"
            )
        return str(frame.loc[pair, "source"]), str(frame.loc[pair, "target"])

    def source_retention(self, pair: str, benchmark: str) -> float | None:
        """Accuracy of the source alone over the target's, from the accuracies that the paper prints."""
        source, target = (self.value("table13", name, benchmark) for name in self.models(pair))
        return None if source is None or target is None else 100 * source / target

    def source_floor_normalised(self, pair: str, benchmark: str) -> float | None:
        """As `source_retention`, after taking chance off both accuracies."""
        source, target = (self.value("table13", name, benchmark) for name in self.models(pair))
        chance = self.value("table11", benchmark, "chance")
        if source is None or target is None or chance is None or target <= chance:
            return None
        return 100 * (source - chance) / (target - chance)

    def gap_recovered(self, pair: str, benchmarks: Sequence[str] = FIVE) -> float | None:
        """Share of the gap between the mean accuracies of source and target that the paper's transfer recovers, in percent.

        For prefix perplexity alone, where lower is better, the share of the gap between the perplexities. None without a gap.
        """
        source, target, transfer = (self._mean(name, benchmarks) for name in (*self.models(pair), pair))
        if source is None or target is None or transfer is None:
            return None
        # One sign for both: higher is better.
        sign = -1 if tuple(benchmarks) == (PERPLEXITY,) else 1
        gap = sign * (target - source)
        return 100 * sign * (transfer - source) / gap if gap > 0 else None

    def _mean(self, name: str, benchmarks: Sequence[str]) -> float | None:
        found = [self.value("table13", name, benchmark) for benchmark in benchmarks]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if len(known) == len(found) else None


def same(cell: object, value: object) -> bool:
    """Whether two cells say the same; `1e-4` and 0.0001 do."""
    try:
        return float(str(cell)) == float(str(value))
    except ValueError:
        return str(cell).casefold() == str(value).casefold()


def _number(cell: object) -> float | None:
    return None if pd.isna(cell) else float(str(cell))


def _read(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path, index_col=0)
    except (OSError, ValueError) as error:
        raise KvferryError(f"{path}: the paper's numbers cannot be read ({error}); restore the file") from error
