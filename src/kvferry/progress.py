"""Progress bars with an estimate on a terminal, for what takes more than a moment; silence in logs. Knows no work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
# A bar that would be gone sooner never shows.
SECONDS = 1.0
BYTES = "B"


def watched() -> bool:
    """Whether somebody watches."""
    return sys.stderr.isatty()


def bar(total: int, what: str, unit: str = "it") -> tqdm[Any]:
    """A bar to update by hand: `with bar(n, "dump", "seq") as b: b.update()`. Of bytes it shows multiples."""
    return tqdm(total=total, desc=what, unit=unit, unit_scale=unit == BYTES, **_how())


def track(items: Iterable[T], what: str, unit: str = "it") -> Iterator[T]:
    """Iterate with a bar."""
    return iter(tqdm(items, desc=what, unit=unit, **_how()))


def _how() -> dict[str, Any]:
    return {"disable": not watched(), "dynamic_ncols": True, "delay": SECONDS}
