"""Which recipe is best: chosen by next-token KL on the even-numbered chunks, which no other number of the choice is made of.

Knows recipes and sizes of mappers. Does not know how a table looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.records import NEXT_TOKEN_KL
from kvferry.report.inputs import Pair, Results, Sweep
from kvferry.report.items import every_other_chunk, limited, record_of, shared_items
from kvferry.report.papers_recipe import LINEAR

SMALL = 4  # a small recipe has at most one part in this many of the headline's parameters
BEST, BEST_SMALL = "best", "best small"


def compared(results: Results, pair: Pair, sweep: Sweep) -> list[str]:
    """The headline, then the other variants of the sweep."""
    return list(dict.fromkeys([results.headline(pair), *sweep.variants]))


def selection_kl(results: Results, pair: Pair, variants: Sequence[str]) -> dict[str, float]:
    """KL by variant on the even-numbered chunks that all of them share, nats a token.

    Raises:
        KvferryError: a record is missing, or there are no chunks on that half.
    """
    even = every_other_chunk(shared_items(results, pair, variants, NEXT_TOKEN_KL), 0)
    return {name: limited(record_of(results, pair, name, NEXT_TOKEN_KL)[1], even).value for name in variants}


def marks(results: Results, pair: Pair, selection: Mapping[str, float]) -> dict[str, str]:
    """BEST, BEST_SMALL, or both, by variant, among closed-form recipes; equal KL goes to the smaller mapper."""
    winners = _winners(results, pair, selection)
    return {name: ", ".join(word for word, own in winners.items() if own == name) for name in winners.values()}


def best_recipe(results: Results, pair: Pair, sweep: Sweep) -> str | None:
    """The variant that is marked BEST; None where no recipe is of a closed form.

    Raises:
        KvferryError: as in `selection_kl`.
    """
    selection = selection_kl(results, pair, compared(results, pair, sweep))
    return _winners(results, pair, selection).get(BEST)


def _winners(results: Results, pair: Pair, selection: Mapping[str, float]) -> dict[str, str]:
    """The variant of each mark."""
    sizes = {name: results.manifests[pair.name, name]["parameters"] for name in selection}
    closed = [name for name in selection if results.recipe(pair.name, name)["method"] in LINEAR]
    small = [name for name in closed if SMALL * sizes[name] <= sizes[results.headline(pair)]]
    return {
        word: min(names, key=lambda name: (selection[name], sizes[name]))
        for word, names in ((BEST, closed), (BEST_SMALL, small))
        if names
    }
