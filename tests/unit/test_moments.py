"""Moments against direct sums in float64, with and without weights, in any sharding and order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_fits import direct, farthest, worst

from kvferry.fit.moments import FIELDS, Moments


def random_rows(n, p=5, q=3, seed=0, dtype=torch.float64):
    """Correlated rows x `[n, p]`, y `[n, q]` with means that are not zero."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, p, generator=random, dtype=torch.float64) @ torch.randn(p, p, generator=random).double() + 2
    y = x @ torch.randn(p, q, generator=random).double() + torch.randn(n, q, generator=random, dtype=torch.float64) - 3
    return x.to(dtype), y.to(dtype)


def added(parts):
    """Moments of parts x, y and, if there are any, weights."""
    moments = Moments.empty(parts[0][0].shape[1], parts[0][1].shape[1])
    for part in parts:
        moments.add(*part)
    return moments


def drawn_weights(weights, n):
    """As many of the drawn weights as there are rows, but for two rows of weight 1, so that rows differ."""
    return torch.tensor([1.0, 1.0, *weights[: n - 2]], dtype=torch.float64)


def test_moments_of_small_whole_numbers_are_exact_in_float32():
    # 16 rows of whole numbers below 8: means are multiples of 1/16, products of centred values need 14 bits and their
    # sums 18, so float32, with its 24, rounds nowhere and the sums must be those of float64.
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 8, (48, width), generator=random).float() for width in (5, 3))
    moments = added(list(zip(x.split(16), y.split(16), strict=True)))
    assert moments.n == 48
    assert worst(moments, x, y) < 1e-10


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), st.integers(0, 1000), st.randoms())
def test_any_sharding_and_order_gives_the_same_moments(sizes, seed, random):
    # Rows in float64, so that products are as precise as sums, and what is left is the algebra of merging.
    x, y = random_rows(sum(sizes) + 1, seed=seed)
    parts = list(zip(x.split([*sizes, 1]), y.split([*sizes, 1]), strict=True))
    random.shuffle(parts)
    moments = added(parts)
    assert moments.n == len(x)
    assert worst(moments, x, y) < 1e-10


weights_of_rows = st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=60, max_size=60)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), weights_of_rows, st.integers(0, 1000), st.randoms())
def test_any_sharding_and_order_of_weighted_rows_gives_the_direct_weighted_sums(sizes, weights, seed, random):
    x, y = random_rows(sum(sizes) + 2, seed=seed)
    weights = drawn_weights(weights, len(x))
    parts = list(zip(*(part.split([*sizes, 2]) for part in (x, y, weights)), strict=True))
    random.shuffle(parts)
    moments = added(parts)
    assert moments.n == pytest.approx(float(weights.sum()), rel=1e-12)
    assert worst(moments, x, y, weights) < 1e-10


@given(st.lists(st.integers(0, 4), min_size=10, max_size=10), st.integers(0, 1000))
def test_whole_weights_are_repeated_rows(counts, seed):
    x, y = random_rows(12, seed=seed)
    weights = drawn_weights(counts, 12)
    repeated = [part.repeat_interleave(weights.long(), dim=0) for part in (x, y)]
    moments, wanted = Moments.of(x, y, weights), Moments.of(*repeated)
    assert moments.n == wanted.n
    assert farthest(moments, wanted) < 1e-10


@given(st.lists(st.booleans(), min_size=10, max_size=10), st.integers(0, 1000))
def test_rows_of_weight_zero_are_left_out(kept, seed):
    x, y = random_rows(12, seed=seed)
    weights = drawn_weights([float(own) for own in kept], 12)
    moments, wanted = Moments.of(x, y, weights), Moments.of(x[weights > 0], y[weights > 0])
    assert moments.n == wanted.n
    assert farthest(moments, wanted) < 1e-10


def test_rows_of_weight_zero_may_hold_anything():
    x, y = random_rows(12)
    weights = torch.ones(12, dtype=torch.float64)
    x[3], y[5], weights[[3, 5]] = float("nan"), float("inf"), 0
    assert worst(Moments.of(x, y, weights), x[weights > 0], y[weights > 0]) < 1e-10


def test_weights_of_zero_alone_are_no_rows():
    moments = Moments.of(*random_rows(7), torch.zeros(7))
    assert moments.n == 0
    assert all(not getattr(moments, name).any() for name in FIELDS)


@given(st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_weights_scaled_by_a_constant_scale_sums_and_leave_means(factor, seed):
    x, y = random_rows(20, seed=seed)
    weights = torch.rand(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    one, other = Moments.of(x, y, weights), Moments.of(x, y, weights * factor)
    assert other.n == pytest.approx(factor * one.n)
    for name in FIELDS:
        unit = 1 if name.startswith("mean") else factor
        torch.testing.assert_close(getattr(other, name), getattr(one, name) * unit, rtol=1e-9, atol=1e-9 * unit)


@pytest.mark.parametrize("features", [1023, 1025, 2050])
def test_many_columns_are_all_multiplied(features):
    x, y = random_rows(4, p=features)
    assert worst(added([(x, y)]), x, y) < 1e-10


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 1000))
def test_merging_is_adding_the_rows(first, second, seed):
    x, y = random_rows(first + second, seed=seed)
    moments = Moments.of(x[:first], y[:first])
    moments.merge(Moments.of(x[first:], y[first:]))
    assert worst(moments, x, y) < 1e-10


@pytest.mark.parametrize("empty_first", [True, False])
def test_merging_with_no_rows_changes_nothing(empty_first):
    x, y = random_rows(7)
    wanted, full, empty = Moments.of(x, y), Moments.of(x, y), Moments.empty(5, 3)
    moments = empty if empty_first else full
    moments.merge(full if empty_first else empty)
    assert moments.n == 7
    for name in FIELDS:
        assert torch.equal(getattr(moments, name), getattr(wanted, name)), name


def test_no_rows_and_no_rows_are_no_rows():
    moments = Moments.empty(5, 3)
    moments.merge(Moments.empty(5, 3))
    assert moments.n == 0
    assert all(not getattr(moments, name).any() for name in FIELDS)


def test_what_is_added_to_a_copy_is_not_in_the_original():
    x, y = random_rows(9)
    moments = Moments.of(x[:4], y[:4])
    copy = moments.copy()
    copy.add(x[4:], y[4:])
    assert worst(moments, x[:4], y[:4]) < 1e-10
    assert worst(copy, x, y) < 1e-10


@pytest.mark.parametrize("outputs", [torch.tensor([2, 0]), slice(1, 3)])
def test_a_part_holds_the_moments_of_its_columns_in_their_order(outputs):
    x, y = random_rows(9)
    features = torch.tensor([4, 0, 3])
    part = Moments.of(x, y).part(features, outputs)
    assert part.n == 9
    assert worst(part, x[:, features], y[:, outputs]) < 1e-10


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 1e6])
@pytest.mark.parametrize("chunk", [1, 7, 500])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_large_mean_costs_no_precision(offset, chunk, weighted):
    # float32 rows of spread 1 about `offset`; a raw-moment subtraction in float32 would lose offset² · 6e-8: 6 at 1e4.
    x, y = random_rows(2000, dtype=torch.float32)
    x, y = x + offset, y + offset
    weights = torch.rand(2000, generator=torch.Generator().manual_seed(0)) if weighted else None
    parts = [part.split(chunk) for part in (x, y, weights) if part is not None]
    moments = added(list(zip(*parts, strict=True)))
    wanted = direct(x, y, weights)
    for name in ("xx", "xy", "yy"):
        error = (getattr(moments, name) - wanted[name]).abs().max() / wanted[name].abs().max()
        # sums of up to 500 float32 products: 500 · 6e-8 at worst, about its square root in practice
        assert error < 2e-6, name
    assert (moments.mean_x - wanted["mean_x"]).abs().max() < 1e-10 * max(1, abs(offset))
