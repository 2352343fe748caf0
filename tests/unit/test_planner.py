"""Sizes of the paper's six pairs to the digits that it prints, a small config by hand, and what cannot be planned says so."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvferry.config import Geometry, load_project, read_yaml
from kvferry.files import write_json
from kvferry.fit.budget import MB, Choice, Sums, choice_of
from kvferry.fit.pair import Extent
from kvferry.kv.dump import INDEX
from kvferry.plan_run import Rates
from kvferry.planner import GIB, Plan, Unplanned, main, plan_config, plan_paper, written, written_config
from kvferry.report.paper import Paper
from kvferry.work import moments_of

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "workflow/schemas"
RIDGE = {"method": "ridge", "lambda": 0.01}
PAPER = Paper()
PAIRS = list(PAPER.table("table10").index)
SHIPPED = sorted(file.name for file in (ROOT / "config").glob("*.yaml") if "variants" in read_yaml(file))
GEOMETRIES = Geometry(24, 3, 64), Geometry(30, 3, 64)
CALIBRATION = {"corpus": "qasper", "sequences": 10, "held_out": 2, "length": 9, "stride": 2}


def config_of(memory_mb=3000, **changes):
    """A config of one pair of the default family with a dump of 10 + 2 sequences of 9 tokens, every second kept."""
    return {
        "pairs": ["24l-to-30l"],
        "compute": {"dtype": "bfloat16"},
        "calibration": CALIBRATION,
        "fit": {"memory_mb": memory_mb},
        "variants": {"first": {**RIDGE, "k": 2}, "more": {**RIDGE, "k": 8}, "less": {**RIDGE, "k": 1}},
        "headline": "first",
        "evaluation": {"benchmarks": {"hellaswag": {}}},
        "perplexity": {"corpus": "qasper"},
    } | changes


def project_of(root=ROOT, **changes):
    """The config, checked."""
    return load_project(config_of(**changes), "config.yaml", SCHEMAS, root)


def shipped(name):
    return load_project(read_yaml(ROOT / "config" / name), name, SCHEMAS, ROOT)


@pytest.fixture(scope="module")
def paper_plans():
    return dict(zip(PAIRS, plan_paper(project_of(memory_mb=200_000)), strict=True))


def by_recipe(**changes):
    return {outcome.variant: outcome for outcome in plan_config(project_of(**changes))}


def only(**changes):
    """The one outcome of a config with the recipe `first` alone."""
    (outcome,) = plan_config(project_of(**changes))
    return outcome


def with_recipe(**recipe):
    return only(variants={"first": {**RIDGE, "k": 2, **recipe}})


@pytest.mark.parametrize("pair", PAIRS)
def test_table_12_of_the_paper_to_its_digits(paper_plans, pair):
    plan = paper_plans[pair]
    assert plan.k == PAPER.value("table12", pair, "k")
    assert float(f"{plan.parameters:.2e}") == PAPER.value("table12", pair, "parameters") == plan.paper_parameters
    # float32 in GiB; 12.5 is printed as 12.
    assert round(plan.storage_bytes / GIB) == PAPER.value("table12", pair, "storage_gb") == plan.paper_storage_gib


@pytest.mark.parametrize("pair", PAIRS)
def test_the_registries_have_the_papers_geometries(pair):
    project = project_of()
    (entry,) = [entry for entry in project.pairs.values() if entry["paper"] == pair]
    for role in ("source", "target"):
        geometry, row = project.geometry(entry[role]), PAPER.table("table10").loc[pair]
        assert geometry.layers == row[f"{role}_layers"]
        assert (geometry.kv_heads, geometry.head_dim) == (row["kv_heads"], row["head_dim"])


def test_the_papers_calibration(paper_plans):
    plan = paper_plans["Qwen3 14B→32B"]
    assert (plan.rows, plan.features, plan.p_over_n) == (128_000, 8192, 0.064)
    assert plan.source_dump_bytes == 128_000 * 2 * 40 * 1024 * 2
    assert "all (26)" in written([paper_plans["Ministral 3 3B→8B"]])


def test_a_small_config_by_hand():
    plan = by_recipe()["first"]
    assert (plan.k, plan.rows, plan.features) == (2, 10 * 5, 2 * 3 * 64)
    assert plan.p_over_n == 384 / 50
    assert plan.source_dump_bytes == 12 * 5 * 2 * 24 * 192 * 2
    assert plan.target_dump_bytes == 12 * 5 * 2 * 30 * 192 * 2
    assert plan.solve_flops == 2 * 30 * (384**3 // 3 + 2 * 384**2 * 192)
    assert plan.parameters == 2 * 30 * 384 * 192
    assert plan.apply_flops == 2 * plan.parameters
    assert plan.storage_bytes == 4 * plan.parameters
    assert plan.paper_parameters is None


def test_moments_are_summed_once_for_all_that_can_be_cut_from_them():
    project = project_of(variants={"first": {**RIDGE, "k": 2}, "more": {**RIDGE, "k": "all"}})
    sums = Sums.over(*GEOMETRIES, 24, 10, project.config["calibration"])
    for plan in plan_config(project):
        assert plan.moments == Choice("full", 1, 30, sums.bytes("full", 30))
        assert plan.moments_flops == sums.flops("full")


def test_layer_by_layer_they_are_summed_for_the_largest_k_that_shares_them():
    variants = {
        "first": {**RIDGE, "k": 2},
        "more": {**RIDGE, "k": 4, "rope": "not_reapplied"},
        "fewer": {**RIDGE, "k": 3, "sequences": 4},
        "coupled": {**RIDGE, "k": 6, "rope": "coupled"},
        "sink": {**RIDGE, "k": 7, "row_weights": "sink"},
        "attention": {**RIDGE, "k": 8, "row_weights": "attention"},
    }
    # Full sums would be cheaper, but do not fit.
    memory_mb = 500

    def planned(headline):
        project = project_of(memory_mb=memory_mb, variants=variants, headline=headline)
        return next(plan for plan in plan_config(project) if plan.variant == headline)

    for headline, k, sequences in (
        ("first", 4, 10),
        ("fewer", 3, 4),
        ("coupled", 6, 10),
        ("sink", 7, 10),
        ("attention", 8, 10),
    ):
        sums = Sums.over(*GEOMETRIES, k, sequences, CALIBRATION)
        plan = planned(headline)
        assert plan.moments == choice_of(sums, memory_mb * MB, per_layer_only=True)
        assert plan.moments_flops == sums.flops("per_layer")


def test_rows_of_their_own_are_never_summed_full():
    fewer = {"first": {**RIDGE, "k": "all", "sequences": 4}}
    assert [only(variants=recipes).moments.way for recipes in (fewer, {"first": {**RIDGE, "k": "all"}})] == [
        "per_layer",
        "full",
    ]


def test_the_default_pair_is_planned_as_it_is_summed(tmp_path):
    """Keys with rotation, rows apart and all columns, as `accumulate` decides from the dumps."""
    project = shipped("config.yaml")
    how = moments_of(project, "24l-to-30l")
    for role, geometry in zip(("source", "target"), GEOMETRIES, strict=True):
        identity = {"tokenizer_sha256": "same"}
        index = {"identity": identity, "geometry": vars(geometry), "calibration": project.config["calibration"]}
        write_json(tmp_path / role / INDEX, index)
    assert (how["k"], how["coupled"], how["early"]) == ("all", True, 16)
    needed = Sums.over(*GEOMETRIES, 24, how["sequences"], project.config["calibration"], kinds=3, early=16).bytes(
        "full", 30
    )
    for memory_mb, full in ((project.config["fit"]["memory_mb"], True), (-(-needed // MB) - 1, False)):
        tight = replace(project, config=project.config | {"fit": {"memory_mb": memory_mb}})
        plan = next(plan for plan in plan_config(tight) if plan.pair == "24l-to-30l")
        assert Extent(**how | {"memory_mb": memory_mb}).full(tmp_path / "source", tmp_path / "target") == full
        assert (plan.moments.way == "full") == full
        assert (plan.moments.bytes == needed) == full


@pytest.mark.parametrize("name", SHIPPED)
def test_every_pair_of_a_shipped_config_fits_its_memory(name):
    project = shipped(name)
    plans = plan_config(project)
    assert {plan.pair for plan in plans} == set(project.config["pairs"])
    for plan in plans:
        assert isinstance(plan, Plan), plan
        assert plan.note is None
        assert plan.moments.bytes <= project.config["fit"]["memory_mb"] * MB


def test_the_headline_and_the_largest_k_are_planned_once_each():
    assert list(by_recipe()) == ["first", "more"]
    assert list(by_recipe(headline="more")) == ["more"]
    every = {"first": {**RIDGE, "k": 20}, "whole": {**RIDGE, "k": "all"}}
    assert by_recipe(variants=every)["whole"].k == 24


def test_a_sweep_on_another_pair_does_not_count():
    sweeps = {"k": {"variants": ["more"], "pairs": ["20l-to-30l"]}, "improved": {"variants": ["less"]}}
    plans = plan_config(project_of(pairs=["24l-to-30l", "20l-to-30l"], sweeps=sweeps))
    assert [(plan.pair, plan.variant) for plan in plans] == [
        ("24l-to-30l", "first"),
        ("20l-to-30l", "first"),
        ("20l-to-30l", "more"),
    ]


def test_a_recipes_own_sequences_and_left_out_rows():
    plan = with_recipe(sequences=4, native_head=3, head_rows="left_out")
    # positions 4, 6, 8 of 0, 2, 4, 6, 8
    assert plan.rows == 4 * 3
    assert plan.source_dump_bytes == by_recipe()["first"].source_dump_bytes


def test_a_bfloat16_mapper_takes_half_the_storage():
    assert with_recipe(dtype="bfloat16").storage_bytes == 2 * with_recipe().parameters


def test_same_head_reads_one_head_of_each_layer():
    whole, local = with_recipe(), with_recipe(support="same_head")
    assert local.features == 2 * 64
    assert local.parameters * 3 == whole.parameters
    assert local.solve_flops == 2 * 30 * 3 * (128**3 // 3 + 2 * 128**2 * 64)
    assert local.moments == whole.moments


def test_rows_weighed_by_attention_are_summed_a_layer_at_a_time():
    ways = [with_recipe(k=24, row_weights=weights).moments.way for weights in ("uniform", "attention")]
    assert ways == ["full", "per_layer"]


def test_too_little_memory_is_said_and_the_rest_is_planned():
    plans = dict(zip(PAIRS, plan_paper(project_of(memory_mb=20_000)), strict=True))
    plan, fits = plans["Ministral 3 3B→8B"], plans["Qwen3 14B→32B"]
    assert plan.moments is None
    assert plan.note.startswith("fit.memory_mb: 20000 MB is too little; moments on 26 source layers")
    assert plan.parameters == pytest.approx(PAPER.value("table12", "Ministral 3 3B→8B", "parameters"), rel=0.01)
    assert (fits.moments.way, fits.note) == ("per_layer", None)
    assert plan.note in written([plan])


@pytest.fixture
def workplace(tmp_path):
    """A root whose registry does not say the geometry of qwen3-8b."""
    shutil.copytree(ROOT / "config", tmp_path / "config")
    path = tmp_path / "config/models.yaml"
    models = read_yaml(path)
    del models["models"]["qwen3-8b"]["geometry"]
    path.write_text(yaml.safe_dump(models))
    return tmp_path


def test_an_unknown_geometry_is_said_and_other_pairs_are_planned(workplace):
    pairs, variants = ["qwen3-8b-to-32b", "24l-to-30l"], {"first": {**RIDGE, "k": "all"}}
    unknown, known = plan_config(project_of(workplace, pairs=pairs, variants=variants))
    assert isinstance(known, Plan)
    assert unknown[:2] == ("qwen3-8b-to-32b", "first")
    assert "the geometry of qwen3-8b is not known" in unknown.reason
    assert "`geometry`" in unknown.reason
    assert "config/models.yaml" in unknown.reason
    assert unknown.reason in written([unknown, known])
    assert written([unknown]).count("\n") == 0


def test_the_papers_pairs_with_an_unknown_geometry(workplace):
    outcomes = plan_paper(project_of(workplace))
    assert [o.pair for o in outcomes if isinstance(o, Unplanned)] == ["qwen3-8b-to-32b"]
    assert len(outcomes) == len(PAIRS)


def test_a_trained_mapper_is_not_planned():
    variants = {"first": {"method": "mlp", "k": 8}, "other": {**RIDGE, "k": 1}}
    outcomes = by_recipe(variants=variants)
    assert isinstance(outcomes["first"], Unplanned)
    assert "mlp" in outcomes["first"].reason
    assert isinstance(outcomes["other"], Plan)


def test_columns_of_numbers_end_together(paper_plans):
    for block in written(list(paper_plans.values())).split("\n\n"):
        _title, head, unit, *rows = block.splitlines()
        assert len(rows) == len(PAIRS)
        assert {len(line) for line in (head, unit, *rows)} == {len(head)}


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(config_of()))
    return path


def test_the_command_prints_the_plan_of_a_config(config_file, capsys):
    main([str(config_file)])
    shown = capsys.readouterr().out
    assert shown == written_config(project_of(), Rates.of("cpu")) + "\n"
    assert shown.startswith(written(plan_config(project_of())))
    assert "24l-to-30l" in shown


def test_the_command_prints_the_papers_pairs(config_file, capsys):
    main([str(config_file), "--paper"])
    assert capsys.readouterr().out == written(plan_paper(project_of())) + "\n"


def test_a_wrong_config_is_refused_in_one_sentence(config_file):
    config_file.write_text("pairs: [a")
    with pytest.raises(SystemExit, match=r"mine\.yaml, line 1") as caught:
        main([str(config_file)])
    assert "\n" not in str(caught.value)
