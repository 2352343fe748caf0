"""Intervals against known values and against independent ways to the same number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from kvferry.report import stats
from kvferry.report.stats import Sampled, Undefined, bootstrap_means, bootstrap_ratio, mcnemar_p, mean_of, wilson

REASONS = ("not positive", "unclear")


def test_wilson_of_a_textbook_case():
    assert wilson(41, 100) == pytest.approx((0.3187, 0.5080), abs=5e-5)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_what_scipy_says(case):
    correct, n = case
    other = binomtest(correct, n).proportion_ci(0.95, method="wilson")
    assert wilson(correct, n) == pytest.approx((other.low, other.high), abs=1e-9)


@pytest.mark.parametrize(("correct", "n", "end", "value"), [(0, 24, 0, 0.0), (24, 24, 1, 1.0)])
def test_wilson_is_exact_at_the_ends(correct, n, end, value):
    assert wilson(correct, n)[end] == value


@pytest.mark.parametrize("case", [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_proportion(case):
    with pytest.raises(ValueError, match="wilson needs"):
        wilson(*case)


def test_bootstrap_of_an_accuracy_is_the_binomial():
    scores = (np.arange(100) < 40).astype(float)[None]
    (sampled,) = bootstrap_means(scores, np.ones(100), 20_000, [0])
    assert sampled.value == 0.4
    assert sampled.interval() == pytest.approx(binom.ppf([0.025, 0.975], 100, 0.4) / 100, abs=0.011)
    assert sampled.draws.std() == pytest.approx(np.sqrt(0.4 * 0.6 / 100), rel=0.03)


def test_weighted_means_are_those_of_drawing_items_one_by_one(monkeypatch):
    rng = np.random.default_rng(5)
    scores, weights = rng.normal(size=(3, 17)), rng.integers(1, 9, 17).astype(float)
    monkeypatch.setattr(stats, "BLOCK_CELLS", 17 * 6)  # 20 draws in blocks of 6: the last one is smaller
    sampled = bootstrap_means(scores, weights, 20, [1])
    drawing = np.random.default_rng([1])
    taken = np.concatenate([drawing.integers(17, size=(size, 17)) for size in (6, 6, 6, 2)])
    for row, own in zip(scores, sampled, strict=True):
        assert own.draws == pytest.approx([np.average(row[i], weights=weights[i]) for i in taken])
        assert own.value == pytest.approx(np.average(row, weights=weights))


def test_draws_follow_the_seed():
    scores = np.random.default_rng(0).random((1, 30))
    first, again, other = (bootstrap_means(scores, np.ones(30), 50, [s])[0].draws for s in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()


def test_pairing_makes_the_difference_of_equal_systems_exactly_zero():
    scores = np.random.default_rng(0).random((1, 40)).repeat(2, axis=0)
    one, two = bootstrap_means(scores, np.ones(40), 100, [0])
    assert (one - two).interval() == (0.0, 0.0)


def test_ratio_of_proportional_systems_has_no_width():
    whole = Sampled(0.8, np.array([0.7, 0.8, 0.9]))
    half = Sampled(0.4, np.array([0.35, 0.4, 0.45]))
    ratio = bootstrap_ratio(half, whole, *REASONS)
    assert ratio.value == 0.5
    assert ratio.interval() == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize(
    ("value", "draws", "reason"),
    [
        (0.0, np.zeros(100), "not positive"),
        (-0.1, np.full(100, -0.1), "not positive"),
        (0.1, np.linspace(-0.1, 0.3, 100), "unclear"),
    ],
)
def test_ratio_without_a_sound_denominator_is_undefined(value, draws, reason):
    assert bootstrap_ratio(Sampled(1.0, np.ones(100)), Sampled(value, draws), *REASONS) == Undefined(reason)


def test_rare_draws_without_a_ratio_are_left_out():
    draws = np.r_[-0.5, np.full(99, 0.5)]
    ratio = bootstrap_ratio(Sampled(0.5, draws), Sampled(0.5, draws), *REASONS)
    assert ratio.interval() == (1.0, 1.0)


def test_a_mean_is_undefined_as_soon_as_one_part_is():
    parts = {"a": Sampled(1.0, np.ones(3)), "b": Sampled(2.0, np.full(3, 2.0))}
    assert mean_of(parts).value == 1.5
    assert mean_of(parts).interval() == (1.5, 1.5)
    broken = mean_of(parts | {"c": Undefined("why"), "d": Undefined("why")})
    assert "c, d" in broken.reason
    assert isinstance(mean_of({}), Undefined)


@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_scipys_binomial_test(first, second):
    wanted = binomtest(first, first + second, 0.5).pvalue if first + second else 1.0
    assert mcnemar_p(first, second) == mcnemar_p(second, first)
    assert mcnemar_p(first, second) == pytest.approx(wanted, rel=1e-9)


def test_mcnemar_of_cases_by_hand():
    assert mcnemar_p(0, 5) == 2 / 32
    assert mcnemar_p(1, 5) == 2 * (1 + 6) / 64
    assert mcnemar_p(3, 3) == mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(6000, 7000) == pytest.approx(binomtest(6000, 13000).pvalue, rel=1e-6)
    with pytest.raises(ValueError, match="counts of items"):
        mcnemar_p(-1, 2)
