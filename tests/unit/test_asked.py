"""What systems are asked: everything once, in even jobs, and sharded benchmarks in jobs of their own."""

import copy
from pathlib import Path

import pytest

from kvferry import asked, work
from kvferry.config import load_project, read_yaml
from kvferry.errors import KvferryError

ROOT = Path(__file__).parents[2]
PAIR = "24l-to-30l"
TARGET = "smollm2-135m"
BASE = {"method": "ridge", "lambda": 0.01}
CONTROLS = {"pairs": [PAIR], "benchmarks": {"hellaswag": {"limit": 2}}}


def project(**changes):
    config = copy.deepcopy(read_yaml(ROOT / "config/ci.yaml"))
    for section in ("controls", "coqa", "diagnostics", "latency", "native_tokens"):
        config.pop(section, None)
    config["evaluation"]["benchmarks"] = {
        name: {**how, "shards": 1} for name, how in config["evaluation"]["benchmarks"].items()
    }
    return load_project(config | changes, "ci.yaml", ROOT / "workflow/schemas", ROOT)


def sharded(**shards):
    """The evaluation section with these numbers of shards."""
    evaluation = copy.deepcopy(project().config["evaluation"])
    for name, count in shards.items():
        evaluation["benchmarks"][name]["shards"] = count
    return evaluation


@pytest.fixture(scope="module", params=["config", "ci", "family", "improved", "small", "paper"])
def shipped(request):
    name = f"config/{request.param}.yaml"
    return load_project(read_yaml(ROOT / name), name, ROOT / "workflow/schemas", ROOT)


def test_every_record_is_written_by_one_job(shipped):
    for pair in shipped.config["pairs"]:
        jobs = asked.evaluation_jobs(shipped, pair)
        written = [(s, n, job.shard) for job in jobs.values() for s, names in job.records.items() for n in names]
        assert len(written) == len(set(written))
        assert {system for system, _, _ in written} >= {*work.variants_of(shipped, pair), "zero_cache"}


def test_a_variant_of_two_sweeps_answers_the_union_with_the_larger_limit():
    sweeps = {
        "k": {"base": BASE, "over": {"k": [1]}, "benchmarks": {"hellaswag": {"limit": 2}, "mmlu": {"limit": 1}}},
        "improved": {"base": BASE, "over": {"k": [1]}, "benchmarks": {"hellaswag": {"limit": 4}}},
    }
    jobs = asked.evaluation_jobs(project(sweeps=sweeps), PAIR)
    assert [job.limits["ridge_k1"] for job in jobs.values() if "ridge_k1" in job.limits] == [
        {"hellaswag": 4, "mmlu": 1}
    ]


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_jobs_are_even_and_no_larger_than_asked(most):
    evaluation = project().config["evaluation"] | {"systems_a_job": most}
    sizes = [len(job.limits) for job in asked.evaluation_jobs(project(evaluation=evaluation), PAIR).values()]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1


def test_the_headline_answers_all_benchmarks_and_in_full_where_asked():
    evaluation = {"full": True, "benchmarks": {"arc_challenge": {"limit": 8}, "hellaswag": {"limit": 2}, "mmlu": {}}}
    (job,) = asked.evaluation_jobs(project(evaluation=evaluation), PAIR).values()
    assert job.limits["ridge_k4"] == dict.fromkeys(["arc_challenge", "hellaswag", "mmlu"])
    assert job.limits["zero_cache"] == {}


def test_every_system_is_measured():
    for system in ("ridge_k4", "zero_cache", "random_mapper", "wrong_document", "identity", "native_injected"):
        assert asked.measures(system, []) == ["prefix_perplexity", "next_token_kl", "top1_agreement"]
    assert asked.measures("native", []) == ["prefix_perplexity"]


def test_only_mappers_whose_time_is_shown_are_timed():
    sweeps = {
        "k": {"base": BASE, "over": {"k": [1]}},
        "improved": {"base": BASE, "over": {"k": [2], "native_head": [0, 4]}},
    }
    records = asked.records_of_pair(project(sweeps=sweeps), PAIR)
    timed = {system for system, names in records.items() if "apply_time" in names}
    assert timed == {"ridge_k4", *asked.timed_variants(project(sweeps=sweeps), PAIR)}
    assert len(timed) == 3
    assert "ridge_k1" in records.keys() - timed


def test_a_full_run_answers_every_item_of_a_sweeps_benchmarks():
    sweeps = {"k": {"base": BASE, "over": {"k": [1]}, "benchmarks": {"hellaswag": {"limit": 2}}}}
    evaluation = project().config["evaluation"] | {"full": True}
    assert asked.limits_of(project(sweeps=sweeps), "24l-to-30l", "ridge_k1") == {"hellaswag": 2}
    assert asked.limits_of(project(sweeps=sweeps, evaluation=evaluation), "24l-to-30l", "ridge_k1") == {
        "hellaswag": None
    }


def test_a_sharded_benchmark_has_a_job_a_shard_with_every_system_that_answers_it():
    run = project(
        evaluation=sharded(hellaswag=2),
        sweeps={"k": {"base": BASE, "over": {"k": [1]}, "benchmarks": {"hellaswag": {"limit": 3}}}},
    )
    jobs = asked.evaluation_jobs(run, PAIR)
    own = {name: job for name, job in jobs.items() if job.shard}
    assert {name: job.shard for name, job in own.items()} == {"hellaswag-0-of-2": (0, 2), "hellaswag-1-of-2": (1, 2)}
    for job in own.values():
        assert job.limits == {"ridge_k4": {"hellaswag": 4}, "ridge_k1": {"hellaswag": 3}}
        assert job.records == {"ridge_k4": ["hellaswag"], "ridge_k1": ["hellaswag"]}
    others = [job for job in jobs.values() if not job.shard]
    assert not any("hellaswag" in names for job in others for names in job.records.values())
    assert asked.sharded(jobs) == {("ridge_k4", "hellaswag"): 2, ("ridge_k1", "hellaswag"): 2}
    assert "hellaswag" in asked.records_of_pair(run, PAIR)["ridge_k1"]


def test_fewer_items_than_shards_stay_together():
    sweeps = {"k": {"base": BASE, "over": {"k": [1]}, "benchmarks": {"hellaswag": {"limit": 2}}}}
    jobs = asked.evaluation_jobs(project(evaluation=sharded(hellaswag=3), sweeps=sweeps), PAIR)
    assert asked.sharded(jobs) == {("ridge_k4", "hellaswag"): 3}
    assert any(job.limits.get("ridge_k1") == {"hellaswag": 2} for job in jobs.values() if not job.shard)


def test_controls_are_systems_of_their_pairs_and_targets():
    assert asked.identity_models(project()) == []
    run = project(controls=CONTROLS)
    limits = {system: own for job in asked.evaluation_jobs(run, PAIR).values() for system, own in job.limits.items()}
    for control in ("zero_cache", "random_mapper", "wrong_document"):
        assert limits[control] == {"hellaswag": 2}
    (job,) = asked.native_jobs(run, TARGET).values()
    assert job.limits["identity"] == {"hellaswag": 2}
    assert job.limits["native_injected"] == job.limits["native"] == asked.full_limits(run)
    (job,) = asked.native_jobs(run, "smollm2-24l").values()
    assert job.limits.keys() == {"native"}


def test_a_target_is_mapped_to_itself_by_the_headlines_closed_form():
    assert asked.identity_recipe(project(controls=CONTROLS), "smollm2-135m") | {"sequences": 0} == {
        **project().variant("ridge_k4"),
        "k": "all",
        "sequences": 0,
    }


def test_optional_sections_add_records_to_what_they_name():
    plain = asked.records_of_pair(project(), PAIR)
    sections = {
        "coqa": {"pairs": [PAIR], "variants": ["ridge_k1"]},
        "diagnostics": {"held_out": 1},
        "latency": {"pairs": [PAIR]},
        "native_tokens": {"pairs": [PAIR], "counts": [1, 4]},
    }
    run = project(**sections)
    found = asked.records_of_pair(run, PAIR)
    added = {system: set(found[system]) - set(plain[system]) for system in found}
    diagnosed = {*asked.DIAGNOSTICS}
    assert added["ridge_k4"] == {*diagnosed, "coqa_handoff", "latency", "native_tokens", "native_tokens_time"}
    assert added["ridge_k1"] == {*diagnosed, "coqa_handoff"}
    assert added["zero_cache"] == set()
    for model in (TARGET, "smollm2-24l"):
        assert "coqa" in asked.records_of_model(run, model)["native"]


def test_turns_alternate_where_the_pair_is_there_both_ways():
    both = project(pairs=[PAIR, "30l-to-24l"], coqa={"pairs": [PAIR, "30l-to-24l"]})
    assert asked.reverse_of(both, PAIR) == "30l-to-24l"
    assert "coqa_alternate" in asked.records_of_pair(both, PAIR)["ridge_k4"]
    some = project(
        pairs=[PAIR, "30l-to-24l"],
        coqa={"pairs": [PAIR, "30l-to-24l"], "variants": ["ridge_k1"], "alternate": ["ridge_k1"]},
    )
    assert asked.dialogues(some, PAIR) == {"ridge_k4": ["coqa_handoff"], "ridge_k1": ["coqa_handoff", "coqa_alternate"]}
    one = project(pairs=[PAIR, "30l-to-24l"], coqa={"pairs": [PAIR]})
    assert asked.reverse_of(one, PAIR) is None


BACK = "30l-to-24l"


def with_two_headlines(**sections):
    """Both directions, the second with another headline, and a recipe that takes its k from these."""
    variants = {"k4": {**BASE, "k": 4}, "k2": {**BASE, "k": 2}, "same": {**BASE, "k": "headline", "native_head": 1}}
    headline = {"default": "k4", "pairs": {BACK: "k2"}}
    return project(pairs=[PAIR, BACK], variants=variants, headline=headline, sweeps={}, **sections)


def test_each_pair_has_its_headline():
    coqa = {"pairs": [PAIR, BACK], "variants": ["same"]}
    run = with_two_headlines(coqa=coqa, latency={"pairs": [PAIR, BACK]}, native_tokens={"pairs": [BACK], "counts": [1]})
    full = asked.full_limits(run)
    for pair, headline in ((PAIR, "k4"), (BACK, "k2")):
        (job,) = asked.evaluation_jobs(run, pair).values()
        assert {system for system, limits in job.limits.items() if limits == full} == {headline}
        assert work.variants_of(run, pair) == [headline, "same"]
        assert "latency" in asked.records_of_pair(run, pair)[headline]
        assert asked.dialogue_variants(run, pair) == [headline, "same"]
    assert "native_tokens" in asked.records_of_pair(run, BACK)["k2"]
    assert [asked.variant_back(run, PAIR, name) for name in ("k4", "same")] == ["k2", "same"]
    assert asked.variant_back(run, BACK, "k2") == "k4"


def test_a_recipe_takes_its_k_from_the_headline_of_the_pair():
    run = with_two_headlines()
    assert [run.recipe(pair, "same")["k"] for pair in (PAIR, BACK)] == [4, 2]
    assert run.recipe(BACK, "k2") == run.variant("k2")
    assert work.moments_of(run, BACK)["k"] == 2


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"controls": {"pairs": ["20l-to-30l"]}}, r"controls\.pairs\[0\]: '20l-to-30l' is not in pairs"),
        ({"controls": {"pairs": [PAIR], "benchmarks": {"hellaswag": {"limit": 5}}}}, r"5 is more than the 4"),
        ({"controls": {"pairs": [PAIR], "identity_sequences": 13}}, "13 is more than the 12 of calibration.sequences"),
        ({"coqa": {"pairs": [PAIR], "variants": ["nobody"]}}, r"coqa\.variants\[0\]: 'nobody' is not in variants"),
        ({"coqa": {"pairs": [PAIR], "alternate": ["ridge_k1"]}}, r"coqa\.alternate\[0\]: 'ridge_k1' is not in coqa"),
        ({"diagnostics": {"held_out": 3}}, "3 is more than the 2 of calibration.held_out"),
        ({"native_tokens": {"pairs": [PAIR], "counts": [63]}}, "63 leaves nothing of the perplexity.prefix of 64"),
        ({"latency": {"pairs": [PAIR], "lengths": []}}, r"latency\.lengths"),
    ],
)
def test_what_an_optional_section_cannot_have_is_refused(sections, said):
    with pytest.raises(KvferryError, match=said):
        project(**sections)


def test_the_headline_is_not_fitted_on_the_passages_of_boolq():
    evaluation = copy.deepcopy(project().config["evaluation"])
    variants = {"ridge_k4": {**BASE, "k": 4, "corpus": "wikipedia"}}
    with pytest.raises(KvferryError, match=r"evaluation\.benchmarks\.boolq: asks about the passages of 'wikipedia'"):
        project(variants=variants, sweeps={}, evaluation=evaluation)
    del evaluation["benchmarks"]["boolq"]
    assert project(variants=variants, sweeps={}, evaluation=evaluation)
