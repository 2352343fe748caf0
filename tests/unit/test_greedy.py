"""Greedy selection against brute force: numpy's least squares on the rows, of every layer that is left at every step."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from small_fits import SIDES, dump_of, layer_rows, moments_of, pair_rows

from kvferry.errors import KvferryError
from kvferry.fit.greedy import KINDS, greedy, write_greedy
from kvferry.fit.pair import Extent, PairMoments, accumulate

SOURCE = {"layers": 5, "kv_heads": 2, "head_dim": 2}
TARGET = {"layers": 3, "kv_heads": 2, "head_dim": 3}
ROWS = 150
# What 1e-5 of every column's own sum of squares, added to keep systems solvable, takes from R² at the most here.
JITTER = 1e-4


@pytest.fixture(scope="module")
def rows():
    """Layers that repeat each other in part, so that what is best alone is not always best together."""
    rows = pair_rows(ROWS, seed=4, source=SOURCE, target=TARGET)
    for x, _ in rows.values():
        x[:, 4:8] = x[:, :4] + 0.5 * x[:, 4:8]
        x[:, 12:14] = x[:, 8:10] - 0.3 * x[:, 12:14]
    return rows


@pytest.fixture(scope="module")
def moments(rows):
    return moments_of(rows, SOURCE, TARGET)


@pytest.fixture(scope="module")
def table(moments):
    return greedy(moments, 3, 5)


def joint_r2(rows, kind, layer, head, chosen):
    """In-sample R² of a head from all heads of the chosen source layers."""
    x, y = layer_rows(rows, kind, layer, chosen, SOURCE, TARGET)
    y = y.reshape(ROWS, TARGET["kv_heads"], -1)[:, head]
    x, y = x - x.mean(0), y - y.mean(0)
    errors = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    return 1 - (errors**2).sum() / (y**2).sum()


def heads(table):
    """((kind, target layer, head), steps in order)."""
    return table.sort_values("step").groupby(["kind", "target_layer", "head"])


def test_every_step_takes_the_best_of_all_layers_that_are_left(rows, table):
    for (kind, layer, head), steps in heads(table):
        taken = []
        for step in steps.itertuples():
            left = [own for own in range(SOURCE["layers"]) if own not in taken]
            each = {own: joint_r2(rows, KINDS[kind], layer, head, [*taken, own]) for own in left}
            assert step.r2 == pytest.approx(max(each.values()), abs=JITTER)
            assert each[step.source_layer] > max(each.values()) - JITTER
            taken.append(step.source_layer)


def test_what_is_best_together_is_not_what_is_best_alone(rows, table):
    # or the test above would not tell a greedy search from a ranking
    for (kind, layer, head), steps in heads(table):
        alone = [joint_r2(rows, KINDS[kind], layer, head, [own]) for own in range(SOURCE["layers"])]
        if steps["source_layer"].tolist() != np.argsort(alone)[::-1].tolist():
            return
    pytest.fail("every greedy order is that of the layers alone")


def test_r2_never_falls_and_ends_at_that_of_all_layers(rows, table):
    for (kind, layer, head), steps in heads(table):
        assert sorted(steps["source_layer"]) == list(range(SOURCE["layers"]))
        assert steps["r2"].is_monotonic_increasing
        assert steps["r2_all"].nunique() == 1
        assert steps["r2"].iloc[-1] == pytest.approx(steps["r2_all"].iloc[0], abs=1e-9)
        wanted = joint_r2(rows, KINDS[kind], layer, head, list(range(SOURCE["layers"])))
        assert steps["r2_all"].iloc[0] == pytest.approx(wanted, abs=JITTER)


@pytest.mark.parametrize("steps", [1, 3, 5, 9])
def test_there_are_as_many_steps_as_asked_for_and_layers_there_are(moments, table, steps):
    found = greedy(moments, 3, steps)
    assert sorted(found["step"].unique()) == list(range(1, min(steps, 5) + 1))
    pd.testing.assert_frame_equal(found, table[table["step"] <= steps].reset_index(drop=True))


def test_a_row_for_every_kind_layer_head_and_step(table):
    labels = ["kind", "target_layer", "head", "step"]
    assert list(table.columns) == [*labels, "source_layer", "r2", "r2_all", "n", "p_all"]
    wanted = itertools.product(KINDS, range(3), range(TARGET["kv_heads"]), range(1, 6))
    assert list(table[labels].itertuples(index=False, name=None)) == list(wanted)
    assert set(table["n"]) == {ROWS}
    assert set(table["p_all"]) == {5 * 2 * 2}


def test_columns_of_very_different_size_change_nothing(rows, table):
    sizes = torch.logspace(-4, 4, 20).double()
    scaled = {kind: (x * sizes, y) for kind, (x, y) in rows.items()}
    found = greedy(moments_of(scaled, SOURCE, TARGET), 3, 5)
    assert found["source_layer"].tolist() == table["source_layer"].tolist()
    np.testing.assert_allclose(found["r2"], table["r2"], rtol=0, atol=1e-9)


def test_layers_that_repeat_each_other_are_taken_once_as_far_as_they_explain(rows):
    doubled = {kind: (torch.cat([x[:, :4], x[:, :4], x[:, 8:]], 1), y) for kind, (x, y) in rows.items()}
    for (_, _, _), steps in heads(greedy(moments_of(doubled, SOURCE, TARGET), 3, 5)):
        gains = dict(zip(steps["source_layer"], steps["r2"].diff().fillna(steps["r2"]), strict=True))
        assert min(gains[0], gains[1]) < JITTER


def test_layers_that_explain_nothing_are_taken_once_too(rows):
    nothing = moments_of(rows, SOURCE, TARGET)
    for own in nothing.full.values():
        own.xy.zero_()
    for _, steps in heads(greedy(nothing, 3, 5)):
        assert sorted(steps["source_layer"]) == list(range(SOURCE["layers"]))
        assert set(steps["r2"]) == {0.0}


@pytest.mark.parametrize(("count", "wanted"), [(9, {0, 29}), (1, {0}), (2, {0, 29}), (40, set(range(30)))])
def test_target_layers_are_spread_evenly_from_first_to_last(count, wanted):
    source, target = ({"layers": layers, "kv_heads": 1, "head_dim": 1} for layers in (2, 30))
    found = sorted(
        greedy(moments_of(pair_rows(40, 0, source, target), source, target), count, 1)["target_layer"].unique()
    )
    assert len(found) == min(count, 30)
    assert wanted <= set(found)
    if len(found) > 2:
        gaps = np.diff(found)
        assert max(gaps) - min(gaps) <= 1


def test_without_moments_of_all_layers_it_is_refused(moments):
    bare = PairMoments(SOURCE, TARGET, ROWS, {}, None)
    with pytest.raises(KvferryError, match="greedy selection needs the moments of all source layers at once; raise"):
        greedy(bare, 3, 2)


def test_moments_that_are_not_finite_are_refused(rows):
    broken = moments_of(rows, SOURCE, TARGET)
    broken.full["v"].xx[3, 3] = float("nan")
    with pytest.raises(KvferryError, match="target layer 0"):
        greedy(broken, 3, 2)


def test_the_table_on_disk_is_that_of_rows_of_dumps(tiny_model, tmp_path):
    dumps = [dump_of(tiny_model("llama", 3, seed=seed), tmp_path, str(seed)) for seed in range(2)]
    moments = accumulate(*dumps, Extent(len(SIDES["fit"]), 4, "all", 1000))
    write_greedy(moments, {"target_layers": 2, "steps": 2}, tmp_path / "greedy.csv")
    back = pd.read_csv(tmp_path / "greedy.csv")
    pd.testing.assert_frame_equal(back, greedy(moments, 2, 2), check_dtype=False)
    assert set(back["n"]) == {SIDES["fit"].numel()}
    assert set(back["target_layer"]) == {0, 2}
