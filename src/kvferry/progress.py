"""Progress bars with an estimate on a terminal, silence in logs. Knows no work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def bar(total: int, what: str, unit: str = "it") -> tqdm[Any]:
    """A bar to update by hand: `with bar(n, "dump", "seq") as b: b.update()`."""
    return tqdm(total=total, desc=what, unit=unit, disable=not sys.stderr.isatty(), dynamic_ncols=True)


def track(items: Iterable[T], what: str, unit: str = "it") -> Iterator[T]:
    """Iterate with a bar."""
    return iter(tqdm(items, desc=what, unit=unit, disable=not sys.stderr.isatty(), dynamic_ncols=True))
