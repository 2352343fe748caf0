"""Bytes against what the allocator gives out, operations by hand, and the choice at, below and far below what full sums need."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_fits import HOW, width, write_rows
from torch.profiler import ProfilerActivity, profile

from kvferry.config import Geometry
from kvferry.errors import KvferryError
from kvferry.files import write_json
from kvferry.fit.budget import MB, SHARD_SEQUENCES, Choice, Sums, choice_of, fits_full, rows_in
from kvferry.fit.pair import Extent, accumulate
from kvferry.fit.ridge import Solver
from kvferry.fit.systems import SummedSystems
from kvferry.fit.weights import RowRule
from kvferry.kv import dump

SMALL = Sums(Geometry(5, 2, 4), Geometry(7, 3, 8), k_max=2, rows=100, shard_rows=100)
# Full costs less arithmetic: every target layer would read all source layers.
ALL = Sums(Geometry(6, 2, 64), Geometry(9, 2, 64), k_max=6, rows=20_000, shard_rows=4096)
# Per layer costs less arithmetic.
FEW = Sums(Geometry(24, 3, 64), Geometry(30, 3, 64), k_max=1, rows=20_000, shard_rows=4096)
# More features than rows, more rows than features, more outputs than features.
SHAPES = {
    "features": ((12, 2, 16), (12, 2, 16), 50),
    "rows": ((6, 2, 16), (5, 2, 16), 400),
    "outputs": ((4, 2, 16), (9, 2, 16), 900),
}
RULES = {"alike": RowRule(), "some out": RowRule("sink", 4, 16.0, left_out=2)}


@pytest.fixture
def given_out(tmp_path):
    """The most bytes that PyTorch holds at a time during some work, beyond what it held before."""

    def most_of(work):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            work()
        seen.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        steps = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
        held = most = 0
        for _, size in steps:
            held += size
            most = max(most, held)
        return most

    return most_of


@pytest.fixture(params=SHAPES)
def dumps(request, tmp_path):
    """Dumps of random rows in one shard, both geometries, the rows, and the bytes of the shards, which are mapped from disk."""
    *shapes, rows = SHAPES[request.param]
    geometries = [Geometry(*shape) for shape in shapes]
    paths = []
    for name, geometry in zip(("source", "target"), geometries, strict=True):
        own = vars(geometry)
        kinds = {kind: torch.randn(rows, width(own)) for kind in "kv"}
        paths.append(write_rows(tmp_path / name, {"fit": kinds}, own))
    mapped = sum(file.stat().st_size for path in paths for file in path.glob("*.safetensors"))
    return paths, geometries, rows, mapped


@pytest.mark.parametrize("coupled", [False, True])
def test_full_sums_take_what_is_counted(dumps, given_out, coupled):
    paths, (source, target), rows, mapped = dumps
    sums = Sums(source, target, 1, rows, rows, 2 + coupled, early_rows=8)
    found = given_out(lambda: accumulate(*paths, Extent(1, 8, "all", 1000, coupled))) - mapped
    # Positions, rotation tables and the like are not counted.
    assert sums.bytes("full", target.layers) == pytest.approx(found, rel=0.06)


@pytest.mark.parametrize("rule", RULES)
def test_sums_of_a_few_target_layers_take_what_is_counted(dumps, given_out, rule):
    paths, (source, target), rows, mapped = dumps
    sums = Sums(source, target, 2, rows, rows)
    ranked = [[1, 3]] * target.layers
    systems = SummedSystems(*paths, 1, RULES[rule], ranked, [[0, 1, 2]])
    found = given_out(lambda: systems.prepare([0, 1, 2])) - mapped
    # Of the source only layers that are read are held, and rows that weigh alike are not copied once more.
    assert 0.95 * found < sums.bytes("per_layer", 3) < 1.4 * found


def test_a_solution_takes_the_shifted_system_and_its_factor_and_remembers_two_of_all_layers(given_out):
    size = 256
    x = torch.randn(2 * size, size, dtype=torch.float64)
    grams = [x.T @ x, 2 * x.T @ x, 3 * x.T @ x]
    cross = torch.ones(size, 1, dtype=torch.float64)
    some, all_ = (Sums(Geometry(4, 1, size // k), Geometry(1, 1, 1), k, 1, 1) for k in (2, 4))

    def solve(count, shared):
        solver = Solver()
        for gram in grams[:count]:
            solver.nested(gram, cross, [size], 1.0, "here", shared)

    assert some.bytes("per_layer", 0) == pytest.approx(given_out(lambda: solve(1, False)), rel=0.02)
    assert all_.bytes("per_layer", 0) == pytest.approx(given_out(lambda: solve(3, True)), rel=0.02)


def test_keys_with_rotation_are_a_kind_more_and_then_the_probes_heads_follow():
    three = Sums(SMALL.source, SMALL.target, SMALL.k_max, SMALL.rows, 100, kinds=3)
    moments, rows, heads = 8 * (40 * 40 + 40 * 168 + 40 + 2 * 168), 4 * 100 * (40 + 168), 8 * 3 * 20 * (20 + 56)
    assert three.bytes("full", 7) - SMALL.bytes("full", 7) == moments + rows - heads
    assert 2 * three.flops("full") == 3 * SMALL.flops("full")


def test_operations_by_hand():
    assert SMALL.flops("full") == 2 * 100 * (40 * 40 + 2 * 40 * 168)
    assert SMALL.flops("per_layer") == 2 * 7 * 100 * (16 * 16 + 2 * 16 * 24)


def test_rows_beyond_a_shard_take_no_more():
    at, beyond = (Sums(SMALL.source, SMALL.target, 2, rows, shard_rows=100) for rows in (100, 5000))
    assert at.bytes("full", 7) == beyond.bytes("full", 7)
    assert at.bytes("full", 7) < Sums(SMALL.source, SMALL.target, 2, 5000, shard_rows=200).bytes("full", 7)


def test_rows_of_a_dump_by_hand():
    calibration = {"length": 9, "stride": 2}
    # positions 0, 2, 4, 6, 8; of those before 3 two
    assert [rows_in(10, calibration, before) for before in (None, 0, 3, 100)] == [50, 0, 20, 50]
    sums = Sums.over(SMALL.source, SMALL.target, 2, 10, calibration, kinds=3, early=3)
    assert sums == Sums(SMALL.source, SMALL.target, 2, rows=50, kinds=3, shard_rows=40, early_rows=20)


def test_shards_are_as_dumps_have_them():
    assert SHARD_SEQUENCES == dump.SHARD_SEQUENCES


def extent(k, memory_mb, coupled=False):
    return Extent(sequences=10, early=3, k=k, memory_mb=memory_mb, coupled=coupled)


@pytest.fixture
def indices(tmp_path):
    """Dumps without rows: what is to be summed follows from their indices."""
    for name, geometry in (("source", ALL.source), ("target", ALL.target)):
        index = {"identity": {"tokenizer_sha256": "same"}, "geometry": vars(geometry), "calibration": HOW, "shards": []}
        write_json(tmp_path / name / dump.INDEX, index)
    return tmp_path / "source", tmp_path / "target"


@pytest.mark.parametrize("coupled", [False, True])
def test_whether_an_extent_is_summed_full_is_what_the_budget_says(indices, coupled):
    sums = Sums.over(ALL.source, ALL.target, 6, 10, HOW, 2 + coupled, early=3)
    needed = -(-sums.bytes("full", 9) // MB)
    assert extent("all", needed, coupled).full(*indices)
    assert not extent("all", needed - 1, coupled).full(*indices)
    assert fits_full(sums, needed * MB)


def test_an_extent_asks_for_no_more_than_it_can_have(indices):
    """A memory in which not even one target layer could be summed is no reason to stop: the fit may ask for fewer layers."""
    assert not extent("all", 1).full(*indices)
    with pytest.raises(KvferryError, match=r"fit\.memory_mb"):
        choice_of(ALL, 1 * MB)


def test_the_full_way_at_just_what_it_needs_and_per_layer_below():
    need = ALL.bytes("full", 9)
    assert choice_of(ALL, need) == Choice("full", passes=1, layers_a_pass=9, bytes=need)
    below = choice_of(ALL, need - 1)
    assert below.way == "per_layer"
    assert below.bytes < need


def test_far_below_what_the_full_way_needs_one_target_layer_a_pass():
    least = ALL.bytes("per_layer", 1)
    assert choice_of(ALL, least) == Choice("per_layer", passes=9, layers_a_pass=1, bytes=least)


def test_where_full_costs_more_arithmetic_it_is_not_taken_though_it_fits():
    assert FEW.flops("full") > FEW.flops("per_layer")
    assert choice_of(FEW, 1000 * FEW.bytes("full", 30)) == Choice("per_layer", 1, 30, FEW.bytes("per_layer", 30))


def test_full_is_not_taken_where_rows_are_weighed_differently_a_layer():
    plenty = 1000 * ALL.bytes("full", 9)
    assert choice_of(ALL, plenty, per_layer_only=True) == Choice("per_layer", 1, 9, ALL.bytes("per_layer", 9))


def test_layers_are_spread_evenly_over_the_passes():
    budget = ALL.bytes("per_layer", 8)
    assert choice_of(ALL, budget, per_layer_only=True) == Choice("per_layer", 2, 5, ALL.bytes("per_layer", 5))


@pytest.mark.parametrize("sums", [ALL, FEW, SMALL])
def test_a_budget_for_less_than_one_target_layer_says_what_is_needed(sums):
    least = sums.bytes("per_layer", 1)
    with pytest.raises(KvferryError, match=r"^fit\.memory_mb: ") as caught:
        choice_of(sums, least - 1)
    given_mb, needed_mb = map(int, re.findall(r"(\d+) MB", str(caught.value)))
    assert given_mb * MB <= least - 1
    assert (needed_mb - 1) * MB < least <= needed_mb * MB
    assert choice_of(sums, needed_mb * MB)


geometries = st.builds(Geometry, st.integers(1, 40), st.integers(1, 8), st.sampled_from([16, 64, 128]))


@given(geometries, geometries, st.data())
def test_more_memory_never_means_more_passes_and_is_never_exceeded(source, target, data):
    k_max = data.draw(st.integers(1, source.layers))
    sums = Sums(source, target, k_max, rows=5000, shard_rows=4096)
    least, most = sums.bytes("per_layer", 1), sums.bytes("per_layer", target.layers)
    budgets = sorted(data.draw(st.lists(st.integers(least, 2 * most), min_size=2, max_size=5)))
    found = [choice_of(sums, budget, per_layer_only=True) for budget in budgets]
    passes = [choice.passes for choice in found]
    assert passes == sorted(passes, reverse=True)
    for choice, budget in zip(found, budgets, strict=True):
        assert choice.bytes <= budget
        assert (choice.passes - 1) * choice.layers_a_pass < target.layers <= choice.passes * choice.layers_a_pass
        # One pass less would not have fitted.
        fewer = -(-target.layers // (choice.passes - 1)) if choice.passes > 1 else None
        assert fewer is None or sums.bytes("per_layer", fewer) > budget
