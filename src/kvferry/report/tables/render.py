"""Writes a frame as csv (full precision), markdown and LaTeX (rounded, intervals and footnotes folded in).

Knows the column suffixes of `cells`. Does not know what a table is about.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from kvferry.errors import KvferryError
from kvferry.files import write_text
from kvferry.report.names import OF_ALL, column
from kvferry.report.tables.cells import AT_CHANCE, DIFFERENCE, HIGH, LOW, PAPER, REASON, SUFFIXES, UNDEFINED, N

DECIMALS = {"prefix_perplexity": 2, "value": 2, "source": 2, "target": 2, "p_over_n": 3, "parameter_ratio": 2}
DECIMALS |= {"apply_time": 2, "largest_move_pp": 2, "coqa_slope": 2, "p_target": 4, "p_source": 4, "p_headline": 4}
DECIMALS |= {"k_concentration": 2, "k_concentration_vs_ridge": 2, "pearson": 2, "spearman": 2}
PREFIX_DECIMALS = {"r2_": 3, "next_token_kl": 3, "attention_cosine": 3, "v_concentration": 2, "warm": 2, "cold": 2}
DEFAULT_DECIMALS = 1
OF_ANY_SIZE = ("paper", "ours", "difference")  # columns whose rows have different units: three digits that tell
BESIDE = {PAPER: "paper", DIFFERENCE: "ours − paper"}
EMPTY = "–"
TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "→": r"$\to$",
    "²": r"$^2$",
    "λ": r"$\lambda$",
    "ρ": r"$\rho$",
    "×": r"$\times$",
    "−": r"$-$",
    "–": "--",
}


def write_table(frame: pd.DataFrame, stem: Path, caption: str = "") -> None:
    """Write `stem`.csv, .md and .tex.

    Raises:
        KvferryError: the frame is empty, or a file cannot be written.
    """
    if frame.empty:
        raise KvferryError(f"{stem}: the table has no rows; run the evaluations that it is made from first")
    write_text(_beside(stem, ".csv"), frame.to_csv(index=False))
    shown, notes = readable(frame)
    write_text(_beside(stem, ".md"), _markdown(shown, notes, caption))
    write_text(_beside(stem, ".tex"), _latex(shown, notes, caption))


def _beside(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def readable(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The table as people read it: a frame of strings with headings, and its footnotes."""
    bases = [name for name in frame.columns if not _is_part(frame, name) and not frame[name].isna().all()]
    reasons = _reasons(frame)
    shown = {_heading(frame, name): _column(frame, name, reasons) for name in bases}
    notes = [f"({mark}) undefined: {reason}." for reason, mark in reasons.items()]
    if any((frame[name] == "yes").any() for name in frame.columns if str(name).endswith(AT_CHANCE)):
        notes.append("* not above chance: the interval contains chance or lies below it.")
    return pd.DataFrame(shown), notes


def _is_part(frame: pd.DataFrame, name: str) -> bool:
    """Whether a column belongs to another one and is shown within it."""
    return any(name.endswith(suffix) and name.removesuffix(suffix) in frame.columns for suffix in SUFFIXES)


def _reasons(frame: pd.DataFrame) -> dict[str, str]:
    """A letter for each reason, in the order in which a reader meets them."""
    names = [name for name in frame.columns if name.endswith(REASON)]
    found = dict.fromkeys(
        value for row in frame[names].itertuples(index=False) for value in row if isinstance(value, str)
    )
    return {reason: _letters(index) for index, reason in enumerate(found)}


def _letters(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"{chr(ord('a') + index // 26 - 1)}{chr(ord('a') + index % 26)}"


def _heading(frame: pd.DataFrame, name: str) -> str:
    for suffix, words in BESIDE.items():
        if name.endswith(suffix):
            return f"{column(name.removesuffix(suffix))}, {words}"
    n = _common_n(frame, name)
    return column(name) if n is None else f"{column(name)} (n={n})"


def _common_n(frame: pd.DataFrame, name: str) -> int | None:
    """The number of items, where all rows share it, so that it can stand in the heading."""
    values = set(frame[name + N].dropna()) if name + N in frame.columns else set()
    return int(values.pop()) if len(values) == 1 else None


def _column(frame: pd.DataFrame, name: str, reasons: dict[str, str]) -> list[str]:
    own_n = name + N in frame.columns and _common_n(frame, name) is None
    return [_cell(row, name, reasons, own_n) for row in frame.to_dict("records")]


def _cell(row: dict[str, object], name: str, reasons: dict[str, str], own_n: bool) -> str:
    value, low, high = row[name], row.get(name + LOW), row.get(name + HIGH)
    if value == UNDEFINED:
        reason = row.get(name + REASON)
        return f"{UNDEFINED} ({reasons[reason]})" if isinstance(reason, str) else UNDEFINED
    text = _number(value, name)
    if text != EMPTY and not _missing(low):
        text += f" [{_number(low, name)}, {_number(high, name)}]"
    text += "*" if row.get(name + AT_CHANCE) == "yes" else ""
    return f"{text} (n={row[name + N]})" if own_n and text != EMPTY and not _missing(row[name + N]) else text


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _number(value: object, name: str) -> str:
    if _missing(value):
        return EMPTY
    if name.removesuffix(LOW).removesuffix(HIGH) in OF_ANY_SIZE and isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.3g}"
    sign = "+" if name.endswith(DIFFERENCE) else ""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) >= 1e4):
        return f"{int(value):{sign},}"
    return f"{value:{sign}z.{_decimals(name)}f}" if isinstance(value, float) else str(value)


def _decimals(name: str) -> int:
    base = name.removesuffix(PAPER).removesuffix(DIFFERENCE)
    if base in DECIMALS or base.startswith("k_") or base == "k":
        return DECIMALS.get(base, 0)
    fitting = (digits for prefix, digits in PREFIX_DECIMALS.items() if base.startswith(prefix))
    return DEFAULT_DECIMALS if base.endswith(OF_ALL) else next(fitting, DEFAULT_DECIMALS)


def _markdown(shown: pd.DataFrame, notes: list[str], caption: str) -> str:
    body = [[_plain(cell) for cell in line] for line in shown.to_numpy().tolist()]
    lines = [list(shown.columns), ["---"] * len(shown.columns), *body]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join(part for part in (caption, table, *map(_plain, notes)) if part) + "\n"


def _plain(text: str) -> str:
    """Text that markdown shows as it is."""
    return text.replace("|", "\\|").replace("*", "\\*")


def _latex(shown: pd.DataFrame, notes: list[str], caption: str) -> str:
    head, *body = (
        " & ".join(map(_escaped, line)) + r" \\" for line in (list(shown.columns), *shown.to_numpy().tolist())
    )
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            *([rf"\caption{{{_escaped(caption)}}}"] if caption else []),
            rf"\begin{{tabular}}{{{'l' * len(shown.columns)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            *(rf"\par {_escaped(note)}" for note in notes),
            r"\end{table}",
            "",
        ]
    )


def _escaped(text: str) -> str:
    return "".join(TEX.get(character, character) for character in text)
