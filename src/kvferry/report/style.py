"""The look of every figure: colours by name, one style a system, fonts, and files that are byte-equal on every run.

Does not know what is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from kvferry.files import write_text, written_whole
from kvferry.records import ZERO_CACHE
from kvferry.report.inputs import SOURCE

OKABE_ITO = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky blue": "#56B4E9",
    "bluish green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "reddish purple": "#CC79A7",
}
TARGET, TRANSFER = "target", "transfer"
SYSTEMS = {
    TARGET: {"color": OKABE_ITO["black"], "marker": "o", "linestyle": "--"},
    SOURCE: {"color": OKABE_ITO["orange"], "marker": "s", "linestyle": ":"},
    TRANSFER: {"color": OKABE_ITO["blue"], "marker": "^", "linestyle": "-"},
    ZERO_CACHE: {"color": OKABE_ITO["vermillion"], "marker": "x", "linestyle": "-."},
}
# A style a pair, where every curve is a transfer; without yellow, which is faint on white.
PAIRS = tuple(
    zip(
        (
            OKABE_ITO[name]
            for name in ("blue", "vermillion", "bluish green", "reddish purple", "sky blue", "orange", "black")
        ),
        ("o", "s", "^", "D", "v", "P", "X"),
        strict=True,
    )
)
HEAT_MAP = "viridis"
RC = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    "pdf.fonttype": 42,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
PNG_DPI = 200
CHARACTERS_AN_INCH = 14  # of a title


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's own defaults with `RC` over them, whatever the user's configuration says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(RC)
        yield


def line_of(system: str) -> dict[str, str]:
    """Colour and line style of a system, for a line without markers."""
    return {name: SYSTEMS[system][name] for name in ("color", "linestyle")}


def of_pair(index: int) -> dict[str, str]:
    """Colour and marker of the pair with this number in the order of the report; after seven, colours come with other markers."""
    turn, place = divmod(index, len(PAIRS))
    return {"color": PAIRS[place][0], "marker": PAIRS[(place + turn) % len(PAIRS)][1]}


def entitle(figure: Figure, text: str) -> None:
    """Write a title over the figure, in as many lines as its width asks for."""
    figure.suptitle(textwrap.fill(text, int(CHARACTERS_AN_INCH * figure.get_figwidth())))


def legend_below(figure: Figure, handles: list[Artist], most: int) -> Legend:
    """Put a legend under a figure, in as many columns as its width has room for, `most` at the most."""
    for columns in range(most, 1, -1):
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
        if legend.get_window_extent().width <= figure.bbox.width:
            return legend
        legend.remove()
    return figure.legend(handles=handles, loc="outside lower center", frameon=False)


def span(values: pd.Series) -> str:
    """The whole number that all values are, or from the least to the greatest."""
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def save(figure: Figure, drawn: pd.DataFrame, stem: Path) -> None:
    """Write `stem`.pdf, .png and the .csv of exactly what is drawn; call it within `house_style`.

    Raises:
        KvferryError: a file cannot be written.
    """
    for kind, options in (("pdf", {"metadata": {"CreationDate": None}}), ("png", {"dpi": PNG_DPI})):
        with written_whole(stem.with_name(f"{stem.name}.{kind}")) as temporary:
            figure.savefig(temporary, format=kind, **options)
    write_text(stem.with_name(f"{stem.name}.csv"), drawn.to_csv(index=False))
