"""Layers are ranked by the mean of content-space keys and values, and every k is a prefix of the next."""

from itertools import product

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from kvferry.fit.selection import rank_layers, top_layers


def table(k_stripped, v, k_rope=None):
    """A probe table from grids [source layer][target layer]."""
    grids = {"k_rope": k_rope or k_stripped, "k_stripped": k_stripped, "v": v}
    return pd.DataFrame(
        {"kind": kind, "source_layer": source, "target_layer": target, "r2": grid[source][target]}
        for kind, grid in grids.items()
        for source, target in product(range(len(grid)), range(len(grid[0])))
    )


def test_layers_are_ranked_by_the_mean_of_keys_and_values():
    # means: .5, .625, .25 for the first target layer and .5, .125, .5625 for the second; by keys alone 0 would be first
    k_stripped = [[0.875, 0.125], [0.5, 0.125], [0.25, 0.375]]
    v = [[0.125, 0.875], [0.75, 0.125], [0.25, 0.75]]
    assert rank_layers(table(k_stripped, v)) == [[1, 0, 2], [2, 0, 1]]


def test_keys_with_rope_do_not_count():
    assert rank_layers(table([[0.1], [0.2]], [[0.1], [0.2]], k_rope=[[0.9], [0.0]])) == [[1, 0]]


def test_ties_go_to_the_earlier_layer():
    assert rank_layers(table([[0.5]] * 12, [[0.5]] * 12)) == [list(range(12))]


grids = st.tuples(st.integers(1, 5), st.integers(1, 4)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


@given(grids.flatmap(lambda grid: st.tuples(st.just(grid), st.permutations(grid))), st.randoms())
def test_every_ranking_is_sorted_by_score_and_then_by_layer_whatever_the_order_of_rows(grids, random):
    k_stripped, v = grids
    rows = table(k_stripped, v)
    order = list(rows.index)
    random.shuffle(order)
    scores = [
        [k[target] + v_row[target] for k, v_row in zip(k_stripped, v, strict=True)] for target in range(len(v[0]))
    ]
    wanted = [sorted(range(len(score)), key=lambda layer: (-score[layer], layer)) for score in scores]
    assert rank_layers(rows.loc[order]) == wanted


@given(st.lists(st.permutations(range(6)), min_size=1, max_size=4), st.integers(1, 6))
def test_every_k_is_a_prefix_of_the_ranking(ranking, k):
    chosen = top_layers(ranking, k)
    assert [len(layers) for layers in chosen] == [k] * len(ranking)
    assert all(layers == ranked[:k] for layers, ranked in zip(chosen, ranking, strict=True))
    assert all(small == large[:k] for small, large in zip(chosen, top_layers(ranking, 6), strict=True))


def test_all_takes_every_layer_in_their_own_order():
    assert top_layers([[2, 0, 1], [1, 2, 0]], "all") == [[0, 1, 2], [0, 1, 2]]
