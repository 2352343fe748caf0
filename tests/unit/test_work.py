"""Fits of a run: each variant of a pair is fitted once, with others of the same rows."""

from test_asked import BASE, PAIR, ROOT, project, shipped

from kvferry import work
from kvferry.config import load_project, read_yaml

__all__ = ["shipped"]


def test_every_variant_of_a_pair_is_fitted_once(shipped):
    for pair in shipped.config["pairs"]:
        fitted = [name for names in work.fit_jobs(shipped, pair).values() for name in names]
        assert sorted(fitted) == sorted(work.variants_of(shipped, pair))


def test_recipes_of_a_fit_job_share_corpus_sequences_and_rows(shipped):
    for pair in shipped.config["pairs"]:
        for names in work.fit_jobs(shipped, pair).values():
            recipes = [shipped.variant(name) for name in names]
            keys = {(r["corpus"], r["sequences"], r["method"] == "mlp") for r in recipes}
            assert len(keys) == 1
            assert len({recipe["row_weights"] == "attention" for recipe in recipes}) == 1


def test_a_further_corpus_is_dumped_as_long_as_its_largest_fit():
    run = project()
    assert work.calibration_on(run, "wikipedia") == run.config["calibration"] | {"corpus": "wikipedia", "sequences": 4}
    assert work.calibration_on(run, "qasper") == run.config["calibration"]


def test_a_variant_of_more_sequences_than_the_calibration_lengthens_the_dump_and_not_the_moments():
    run = project(variants={"ridge_k4": {**BASE, "k": 4}, "more": {**BASE, "k": 1, "sequences": 20}}, sweeps={})
    assert work.calibration_on(run, "qasper") == run.config["calibration"] | {"sequences": 20}
    assert work.moments_of(run, PAIR)["sequences"] == run.config["calibration"]["sequences"] == 12
    assert work.fit_jobs(run, PAIR) == {"qasper-12": ["ridge_k4"], "qasper-20": ["more"]}


def test_variants_of_conversations_are_run_on_the_pairs_of_these_alone():
    variants = {"ridge_k4": {**BASE, "k": 4}, "ridge_k1": {**BASE, "k": 1}}
    run = project(
        pairs=[PAIR, "30l-to-24l"], variants=variants, sweeps={}, coqa={"pairs": [PAIR], "variants": ["ridge_k1"]}
    )
    assert work.variants_of(run, PAIR) == ["ridge_k4", "ridge_k1"]
    assert work.variants_of(run, "30l-to-24l") == ["ridge_k4"]


def test_only_targets_of_fits_that_weigh_attention_are_dumped_with_it():
    run = project()
    assert work.weighs_attention(run, "smollm2-135m", "qasper")
    assert not work.weighs_attention(run, "smollm2-24l", "qasper")
    assert not work.weighs_attention(run, "smollm2-135m", "wikipedia")


def test_early_rows_reach_as_far_as_any_recipe():
    assert work.early_positions(project(sweeps={}), PAIR) == 0
    sink = {**BASE, "k": 1, "row_weights": "sink", "sink_positions": 3}
    out = {**BASE, "k": 1, "native_head": 7, "head_rows": "left_out"}
    variants = project().config["variants"] | {"a": sink, "b": out}
    assert work.early_positions(project(sweeps={}, variants={"ridge_k4": {**BASE, "k": 4}, "a": sink}), PAIR) == 3
    assert (
        work.early_positions(
            project(sweeps={}, variants={name: variants[name] for name in ("ridge_k4", "a", "b")}), PAIR
        )
        == 7
    )


def test_moments_are_summed_for_the_largest_k_unless_more_is_wanted():
    variants = {"ridge_k4": {**BASE, "k": 4}, "k1": {**BASE, "k": 1}}
    apart = ("greedy", "coqa")
    without = {key: value for key, value in read_yaml(ROOT / "config/ci.yaml").items() if key not in apart}
    plain = load_project(without | {"variants": variants, "sweeps": {}}, "ci.yaml", ROOT / "workflow/schemas", ROOT)
    assert work.moments_of(plain, PAIR)["k"] == 4
    assert work.moments_of(project(variants=variants, sweeps={}), PAIR)["k"] == "all"
