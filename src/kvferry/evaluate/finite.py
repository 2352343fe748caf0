"""A look at logits before they become a score: what is not finite stops the job, with the layer that it comes from.

A key or value that is not finite makes the logits of all that reads it so. Hence the cache, own or mapped, is looked at only
once logits show it, and a look at finite ones costs two passes over them. Does not know what a row is a prompt of: who does
names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from kvferry.errors import KvferryError
from kvferry.kv.cache import cache_layers
from kvferry.kv.handoff import Prefix

REMEDY = "use another dtype, or look at the model and at the mapper"


class NotFinite(KvferryError):
    """A row of a batch whose numbers are not finite, and where that begins."""

    def __init__(self, row: int, where: str) -> None:
        super().__init__(f"row {row} of a batch: {where}; {REMEDY}")
        self.row, self.where = row, where


@contextmanager
def named(name: Callable[[int], str]) -> Iterator[None]:
    """Say in place of a row's number what it is.

    Raises:
        KvferryError: something in the body was not finite.
    """
    try:
        yield
    except NotFinite as error:
        raise KvferryError(f"{name(error.row)}: {error.where}; {REMEDY}") from error


def check_finite(logits: Tensor, prefix: Prefix, numbers: Sequence[int], places: Sequence[int] | None = None) -> None:
    """Refuse logits that are not finite: `[rows, ..., vocabulary]` at the end of a prefix, or `[places, vocabulary]`.

    numbers: what the caller calls each row of the prefix. places: the row of each place, where there is not one a row.

    Raises:
        NotFinite: with the number of the first such row, and the first layer of its cache where something is not finite.
    """
    # Not `isfinite` of all of them: that would take several tensors of their size.
    finite = logits.amin(-1).isfinite() & logits.amax(-1).isfinite()
    if not finite.all():
        place = int((~finite).nonzero()[0, 0])
        row = place if places is None else places[place]
        raise NotFinite(numbers[row], _first_of(prefix, row))


def _first_of(prefix: Prefix, row: int) -> str:
    """Where in the cache of a row something is not finite first, layer by layer."""
    filled = prefix.mask[row].bool()
    for layer, pair in enumerate(cache_layers(prefix.cache)):
        for what, part in zip(("key", "value"), pair, strict=True):
            bad = ~part[row][:, filled].isfinite().all(-1).all(0)
            if bad.any():
                token = int(bad.nonzero()[0, 0])
                return f"layer {layer} of the target's cache holds a {what} that is not finite, of token {token}"
    return "the target's logits are not finite, though its cache is in every layer"
