"""Bytes against real tensors, operations by hand, and the choice at, below and far below what the full way needs."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import Geometry
from kvferry.errors import KvferryError
from kvferry.fit.budget import CHUNK_ROWS, MB, Choice, Sums, choose

SMALL = Sums(Geometry(5, 2, 4), Geometry(7, 3, 8), k_max=2, rows=100)
# Full costs less arithmetic: every target layer would read all source layers.
ALL = Sums(Geometry(6, 2, 64), Geometry(9, 2, 64), k_max=6, rows=20_000)
# Per layer costs less arithmetic.
FEW = Sums(Geometry(24, 3, 64), Geometry(30, 3, 64), k_max=1, rows=20_000)


def chosen(sums, budget, **how):
    return choose(sums.source, sums.target, sums.k_max, sums.rows, budget, **how)


def moments(features, outputs):
    """Gram, cross moments, two means and the outputs' squares, as they are summed."""
    shapes = (features, features), (features, outputs), (features,), (outputs,), (outputs,)
    return [torch.zeros(shape, dtype=torch.float64) for shape in shapes]


def work(sums, features, outputs):
    """A chunk of rows of both models, its products, and a shifted system with its factor."""
    wide = sums.k_max * sums.source.kv_heads * sums.source.head_dim
    columns = sum(g.layers * g.kv_heads * g.head_dim for g in (sums.source, sums.target))
    solution = [torch.zeros(wide, wide, dtype=torch.float64) for _ in range(2)]
    shapes = (features, features), (features, outputs)
    products = [torch.zeros(shape, dtype=dtype) for shape in shapes for dtype in (torch.float32, torch.float64)]
    return [torch.zeros(sums.rows, columns), *products, *solution]


def size(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def test_bytes_are_those_of_real_tensors():
    full = [tensor for _ in range(2) for tensor in moments(5 * 8, 7 * 24)]
    assert SMALL.bytes("full", 7) == size(full + work(SMALL, 5 * 8, 7 * 24))
    for layers in (1, 3, 7):
        each = [tensor for _ in range(2 * layers) for tensor in moments(2 * 8, 24)]
        assert SMALL.bytes("per_layer", layers) == size(each + work(SMALL, 2 * 8, 24))


def test_one_kind_of_cache_needs_half_the_moments():
    one = Sums(SMALL.source, SMALL.target, SMALL.k_max, SMALL.rows, kinds=1)
    assert SMALL.bytes("full", 7) - one.bytes("full", 7) == size(moments(40, 168))
    assert SMALL.flops("full") == 2 * one.flops("full")


def test_operations_by_hand():
    assert SMALL.flops("full") == 2 * 100 * (40 * 40 + 2 * 40 * 168)
    assert SMALL.flops("per_layer") == 2 * 7 * 100 * (16 * 16 + 2 * 16 * 24)


def test_a_chunk_of_rows_does_not_grow_with_the_text():
    at, beyond = (Sums(SMALL.source, SMALL.target, 2, rows) for rows in (CHUNK_ROWS, 50 * CHUNK_ROWS))
    assert at.bytes("full", 7) == beyond.bytes("full", 7) > SMALL.bytes("full", 7)


def test_the_full_way_at_just_what_it_needs_and_per_layer_below():
    need = ALL.bytes("full", 9)
    assert chosen(ALL, need) == Choice("full", passes=1, layers_a_pass=9, bytes=need)
    below = chosen(ALL, need - 1)
    assert below.way == "per_layer"
    assert below.bytes < need


def test_far_below_what_the_full_way_needs_one_target_layer_a_pass():
    least = ALL.bytes("per_layer", 1)
    assert chosen(ALL, least) == Choice("per_layer", passes=9, layers_a_pass=1, bytes=least)


def test_where_full_costs_more_arithmetic_it_is_not_taken_though_it_fits():
    assert FEW.flops("full") > FEW.flops("per_layer")
    assert chosen(FEW, 1000 * FEW.bytes("full", 30)) == Choice("per_layer", 1, 30, FEW.bytes("per_layer", 30))


def test_full_is_not_taken_where_rows_are_weighed_differently_a_layer():
    plenty = 1000 * ALL.bytes("full", 9)
    assert chosen(ALL, plenty, per_layer_only=True) == Choice("per_layer", 1, 9, ALL.bytes("per_layer", 9))


def test_layers_are_spread_evenly_over_the_passes():
    budget = ALL.bytes("per_layer", 8)
    assert chosen(ALL, budget, per_layer_only=True) == Choice("per_layer", 2, 5, ALL.bytes("per_layer", 5))


@pytest.mark.parametrize("sums", [ALL, FEW, SMALL])
def test_a_budget_for_less_than_one_target_layer_says_what_is_needed(sums):
    least = sums.bytes("per_layer", 1)
    with pytest.raises(KvferryError, match=r"^fit\.memory_mb: ") as caught:
        chosen(sums, least - 1)
    given_mb, needed_mb = map(int, re.findall(r"(\d+) MB", str(caught.value)))
    assert given_mb * MB <= least - 1
    assert (needed_mb - 1) * MB < least <= needed_mb * MB
    assert chosen(sums, needed_mb * MB)


geometries = st.builds(Geometry, st.integers(1, 40), st.integers(1, 8), st.sampled_from([16, 64, 128]))


@given(geometries, geometries, st.data())
def test_more_memory_never_means_more_passes_and_is_never_exceeded(source, target, data):
    k_max = data.draw(st.integers(1, source.layers))
    sums = Sums(source, target, k_max, rows=5000)
    least, most = sums.bytes("per_layer", 1), sums.bytes("per_layer", target.layers)
    budgets = sorted(data.draw(st.lists(st.integers(least, 2 * most), min_size=2, max_size=5)))
    found = [chosen(sums, budget, per_layer_only=True) for budget in budgets]
    passes = [choice.passes for choice in found]
    assert passes == sorted(passes, reverse=True)
    for choice, budget in zip(found, budgets, strict=True):
        assert choice.bytes <= budget
        assert (choice.passes - 1) * choice.layers_a_pass < target.layers <= choice.passes * choice.layers_a_pass
        # One pass less would not have fitted.
        fewer = -(-target.layers // (choice.passes - 1)) if choice.passes > 1 else None
        assert fewer is None or sums.bytes("per_layer", fewer) > budget
