"""What a run takes: forward passes and fits of a small config by hand, and what follows from the rates that are assumed."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.config import load_project, read_yaml
from kvferry.errors import KvferryError
from kvferry.plan_passes import ITEMS, Passes
from kvferry.plan_run import Rates, Stage, plan_run, written_run
from kvferry.planner import main, plan_variants

ROOT = Path(__file__).parents[2]
PAIR, SOURCE, TARGET = "24l-to-30l", "smollm2-24l", "smollm2-135m"
WEIGHTS = {SOURCE: 1e8, TARGET: 2e8}
RIDGE = {"method": "ridge", "lambda": 0.01}
BENCHMARKS = {"hellaswag": {"limit": 10}, "gsm8k": {"limit": 3}}
CONFIG = {
    "pairs": [PAIR],
    "calibration": {"corpus": "qasper", "sequences": 10, "held_out": 2, "length": 8, "stride": 2},
    "variants": {
        "first": {**RIDGE, "k": 2},
        "more": {**RIDGE, "k": 3},
        "net": {"method": "mlp", "k": 2, "mlp": {"width": 5, "epochs": 7}},
    },
    "headline": "first",
    "evaluation": {"benchmarks": BENCHMARKS, "hold_back": 2, "max_new_tokens": 50},
    "perplexity": {"corpus": "qasper", "chunks": 3, "prefix": 6, "scored": 4},
}


def project_of(**changes):
    return load_project(CONFIG | changes, "config.yaml", ROOT / "workflow/schemas", ROOT)


def stages_of(project):
    plans = {pair: plan_variants(project, pair) for pair in project.config["pairs"]}
    return {stage.name: stage for stage in plan_run(project, plans)}, plans


def test_dumps_read_every_sequence_once_a_model():
    assert Passes(project_of(), WEIGHTS, {}).dumps() == 2 * (1e8 + 2e8) * (10 + 2) * 8


def test_evaluation_reads_contexts_once_and_the_rest_a_system():
    project = project_of(variants={"first": CONFIG["variants"]["first"]})
    hellaswag, gsm8k = ITEMS["hellaswag"], ITEMS["gsm8k"]
    contexts = 10 * hellaswag.context + 3 * gsm8k.context + 3 * 6
    tail = 10 * (hellaswag.continuations + 2) + 3 * (50 + 2) + 3 * 4
    alone = 2 * 1e8 * (contexts + tail) + 2 * 2e8 * (contexts + 2 * tail)  # the target injected as well
    # the headline answers all, the zeroed cache only the chunks
    mapped = 2 * 1e8 * contexts + 2 * 2e8 * (tail + 3 * 4) + 9 * contexts
    assert Passes(project, WEIGHTS, {(PAIR, "first"): 9}).evaluation() == pytest.approx(alone + mapped)


def test_shards_add_no_answers():
    whole, parts = (
        project_of(evaluation=CONFIG["evaluation"] | {"benchmarks": {"hellaswag": {"limit": 8, "shards": n}}})
        for n in (1, 4)
    )
    assert Passes(parts, WEIGHTS, {}).evaluation() == pytest.approx(Passes(whole, WEIGHTS, {}).evaluation())
    assert stages_of(parts)[0]["evaluate"].jobs == stages_of(whole)[0]["evaluate"].jobs + 3 * 4 + 4


def test_a_full_run_answers_every_item():
    few, all_items = (
        project_of(evaluation=CONFIG["evaluation"] | {"benchmarks": {"hellaswag": {"limit": n}}, "full": full})
        for n, full in ((ITEMS["hellaswag"].all, False), (1, True))
    )
    assert Passes(all_items, WEIGHTS, {}).evaluation() == Passes(few, WEIGHTS, {}).evaluation()


def test_sums_of_other_text_are_counted_though_they_are_as_large():
    corpora = {name: {**RIDGE, "k": 2, "corpus": name} for name in ("wikipedia", "python-code")}
    stages, plans = stages_of(project_of(variants={"first": CONFIG["variants"]["first"], **corpora}))
    first, *others = plans[PAIR]
    assert others[0].moments_flops == others[1].moments_flops
    summed = first.moments_flops + sum(plan.moments_flops for plan in others)
    assert stages["fit"].fit == summed + sum(plan.solve_flops for plan in plans[PAIR])


def test_a_fit_counts_moments_once_solutions_and_training():
    stages, plans = stages_of(project_of())
    first, more = plans[PAIR]
    weights = 2 * 30 * 3 * (2 * 3 * 64 * 5 + 5 * 5 + 5 * 64)
    training = 6 * weights * 10 * 4 * 7
    assert first.moments_flops == more.moments_flops
    assert stages["fit"].fit == first.moments_flops + first.solve_flops + more.solve_flops + training
    kept = first.moments.bytes if first.moments.way == "full" else 0
    assert stages["fit"].disk == kept + first.storage_bytes + more.storage_bytes + 4 * weights


def test_what_is_measured_beside_adds_to_the_run():
    sections = {
        "coqa": {"pairs": [PAIR], "conversations": 2, "turns": 2},
        "latency": {"pairs": [PAIR], "lengths": [100], "trials": 3, "warm_up": 1},
        "native_tokens": {"pairs": [PAIR], "counts": [1]},
        "diagnostics": {"held_out": 1},
    }
    alone = [stages_of(project_of(**{name: own}))[0]["measure"] for name, own in sections.items()]
    together = stages_of(project_of(**sections))[0]["measure"]
    assert [stage.jobs for stage in alone] == [3, 1, 1, 1]
    assert together.jobs == 6
    assert together.passes == pytest.approx(sum(stage.passes for stage in alone))
    assert alone[1].passes == pytest.approx(2 * (134.5e6 + 113.3e6) * 4 * 100)


def test_models_and_dumps_on_disk():
    stages, plans = stages_of(project_of())
    assert stages["prepare"].disk == pytest.approx(4 * (134.5e6 + 113.3e6))
    assert stages["dump"].disk == plans[PAIR][0].source_dump_bytes + plans[PAIR][0].target_dump_bytes


def test_each_corpus_is_dumped_once_a_model():
    other = CONFIG["variants"]["first"] | {"corpus": "wikipedia", "sequences": 4}
    stages, _ = stages_of(project_of(variants=CONFIG["variants"] | {"other": other}))
    assert stages["dump"].jobs == 4
    assert stages["dump"].disk == stages_of(project_of())[0]["dump"].disk * (1 + (4 + 2) / (10 + 2))


def test_a_model_of_unknown_size_leaves_hours_open():
    known = project_of()
    models = known.models | {TARGET: {key: value for key, value in known.models[TARGET].items() if key != "parameters"}}
    project = replace(known, models=models)
    stages, _ = stages_of(project)
    assert stages["evaluate"].hours(Rates.of("cuda")) is None
    assert stages["evaluate"].jobs > 0
    *_, last = written_run(list(stages.values()), Rates.of("cuda")).splitlines()
    name, _, forward, _, hours, disk = last.split()
    assert (name, forward, hours, disk) == ("all", "–", "–", "–")


def test_hours_follow_from_both_rates():
    stage = Stage("any", 1, passes=7.2e18, fit=3.6e17)
    assert stage.hours(Rates.of("cuda", 100, 10)) == pytest.approx(20 + 10)
    assert Rates.of("cuda").device == "GPU"
    assert Rates.of("cpu", fit=3) == replace(Rates.of("cpu"), fit=3)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_is_positive(rate):
    with pytest.raises(KvferryError, match="positive number of TFLOP/s"):
        Rates.of("cuda", rate)


def test_the_command_takes_rates(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    hours = []
    for tflops in ("1", "2"):
        main(["config/config.yaml", "--tflops", tflops, "--fit-tflops", "1e9"])
        last = capsys.readouterr().out.splitlines()[-1]
        hours.append(float(last.split()[-2]))
    assert hours[0] == pytest.approx(2 * hours[1], rel=0.01)


def test_the_sum_is_of_all_stages():
    stages = [Stage("a", 2, 1e18, 5e15, 2**30), Stage("b", 3, 3e18, 0, 2**31)]
    *_, first, second, last = written_run(stages, Rates.of("cuda", 200, 20)).splitlines()
    assert first.split() == ["a", "2", "1,000", "5.00", "1.46", "1.00"]
    assert second.split() == ["b", "3", "3,000", "–", "4.17", "2.00"]
    assert last.split() == ["all", "5", "4,000", "5.00", "5.62", "3.00"]


def test_every_shipped_config_is_planned():
    for path in sorted((ROOT / "config").glob("*.yaml")):
        if "variants" in read_yaml(path):
            stages, _ = stages_of(load_project(read_yaml(path), path.name, ROOT / "workflow/schemas", ROOT))
            assert all(stage.passes is not None for stage in stages.values()), path
