"""The look of every figure: colours by name, one style a system, fonts, and files that are byte-equal on every run.

Does not know what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

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


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's own defaults with `RC` over them, whatever the user's configuration says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(RC)
        yield


def save(figure: Figure, drawn: pd.DataFrame, stem: Path) -> None:
    """Write `stem`.pdf, .png and the .csv of exactly what is drawn; call it within `house_style`.

    Raises:
        KvferryError: a file cannot be written.
    """
    for kind, options in (("pdf", {"metadata": {"CreationDate": None}}), ("png", {"dpi": PNG_DPI})):
        with written_whole(stem.with_name(f"{stem.name}.{kind}")) as temporary:
            figure.savefig(temporary, format=kind, **options)
    write_text(stem.with_name(f"{stem.name}.csv"), drawn.to_csv(index=False))
