"""The table of controls, the anchors, the held-out benchmarks and the choice of k, from made-up records."""

from dataclasses import replace

import pandas as pd
import pytest
from scipy.stats import binomtest
from test_report_inputs import CORRECT, NATS, PAPER_PAIRS, accuracy_items, chunk_items, perplexity_items
from test_report_sweeps import FULL, PAIR, SWEPT_CONFIG, build_swept, few_items, load, swept_manifest

from kvferry.errors import KvferryError
from kvferry.records import (
    ATTENTION_COSINE_HELD_OUT,
    IDENTITY,
    NATIVE_INJECTED,
    RANDOM_MAPPER,
    WRONG_DOCUMENT,
    Item,
    Record,
)
from kvferry.report.inputs import Results
from kvferry.report.items import record_of
from kvferry.report.tables import write_table
from kvferry.report.tables.anchors import table14_anchors
from kvferry.report.tables.choice import k_choice
from kvferry.report.tables.controls import controls
from kvferry.report.tables.held_out import table18_held_out
from kvferry.report.tables.render import readable

METRICS = {"prefix_perplexity": "perplexity", "next_token_kl": "kl", "top1_agreement": "agreement"}
CHANCES = {"piqa": 0.5, "boolq": 0.5, "arc_easy": 0.25, "hellaswag": 0.25}


def record(system, name, items):
    return Record(system, "big", name, METRICS.get(name, "acc"), items, chance=CHANCES.get(name))


def measures(nats, kl, correct=None, agreement=0.5):
    """Items of a control; HellaSwag on 20 of the 100 items."""
    found = {"prefix_perplexity": perplexity_items(nats), "next_token_kl": chunk_items(kl, kl)}
    found |= {"top1_agreement": chunk_items(agreement, agreement)}
    return found | ({} if correct is None else {"hellaswag": few_items(correct)})


CONTROLS = {RANDOM_MAPPER: measures(6.0, 3.0, 4), WRONG_DOCUMENT: measures(4.5, 2.5, 6)}
OF_TARGET = {NATIVE_INJECTED: measures(NATS["big"], 0.0, 18, 1.0), IDENTITY: measures(2.51, 0.01, 17)}


def with_records(results, transfers=None, injected=None, native=None, held_out=()):
    """The results and more records; what is injected has keys (system, model, name)."""
    own = {(PAIR, *key): record(*key, items) for key, items in (transfers or {}).items()}
    through = {(system, "big", name): record(system, name, items) for (system, name), items in (injected or {}).items()}
    alone = {(model, name): record("native", name, items) for (model, name), items in (native or {}).items()}
    more = replace(
        results, transfers={**results.transfers, **own}, native={**results.native, **alone}, injected=through
    )
    object.__setattr__(more, "held_out_benchmarks", list(held_out))
    return more


def flat(records):
    return {(system, name): items for system, by_name in records.items() for name, items in by_name.items()}


def controlled(tmp_path, changes=None, **more):
    wanted = flat(CONTROLS) | (changes or {})
    return with_records(load(build_swept(tmp_path)), wanted, more.pop("injected", flat(OF_TARGET)), **more)


def row(frame, **wanted):
    (found,) = (frame[(frame[list(wanted)] == pd.Series(wanted)).all(axis=1)]).to_dict("records")
    return found


def test_controls_stand_between_the_target_and_what_is_worthless(tmp_path):
    frame = controls(controlled(tmp_path))
    order = ["target", "native_injected", "identity", "ridge_k8", "source alone", "zero_cache"]
    assert frame["system"].tolist() == [*order, "random_mapper", "wrong_document"]
    assert set(frame["pair"]) == {PAIR}


def test_controls_are_compared_on_the_items_that_all_answered(tmp_path):
    frame = controls(controlled(tmp_path))
    asked = frame.dropna(subset=["hellaswag"])
    assert set(asked["hellaswag_n"]) == {20}
    # The target is right on items 0–89 of 100, so on 18 of the 20; the zero cache answered none of them.
    assert asked["hellaswag"].tolist() == pytest.approx([90, 90, 85, 75, 60, 20, 30])
    assert row(frame, system="zero_cache")["hellaswag"] is None
    assert row(frame, system="zero_cache")["next_token_kl"] == pytest.approx(2.0)
    assert row(frame, system="target")["next_token_kl"] is None
    assert row(frame, system="random_mapper")["next_token_kl_n"] == 24


def test_differences_to_the_headline_are_paired(tmp_path):
    frame = controls(controlled(tmp_path))
    found = row(frame, system="random_mapper")
    assert found["next_token_kl_vs_headline"] == pytest.approx(2.8)
    assert (found["next_token_kl_vs_headline_low"], found["next_token_kl_vs_headline_high"]) == pytest.approx(
        (2.8, 2.8)
    )
    assert found["hellaswag_vs_headline"] == pytest.approx(-55)
    assert found["hellaswag_vs_headline_low"] < -55 < found["hellaswag_vs_headline_high"] < 0
    assert (found["only_right_headline"], found["only_wrong_headline"]) == (0, 11)
    assert found["p_headline"] == pytest.approx(binomtest(0, 11).pvalue)
    own = row(frame, system="ridge_k8")
    assert [own[name] for name in ("next_token_kl_vs_headline", "hellaswag_vs_headline", "p_headline")] == [None] * 3


def test_the_injected_cache_says_how_many_answers_differ(tmp_path):
    same = controls(controlled(tmp_path))
    assert row(same, system="native_injected")["items_differing"] == 0
    assert row(same, system="native_injected")["items_differing_n"] == 20
    assert row(same, system="identity")["items_differing"] is None
    # As many right answers, to other items.
    moved = [*few_items(17)[:17], Item("85", 0.0), Item("90", 1.0), Item("95", 0.0)]
    injected = flat(OF_TARGET) | {(NATIVE_INJECTED, "hellaswag"): moved}
    found = row(controls(controlled(tmp_path, injected=injected)), system="native_injected")
    assert (found["hellaswag"], found["items_differing"]) == (pytest.approx(90), 2)


def test_a_text_that_differs_counts_though_both_are_wrong(tmp_path):
    injected = flat(OF_TARGET) | {(NATIVE_INJECTED, "gsm8k"): [Item("95", 0.0, 1.0, "7"), Item("96", 0.0, 1.0, "6")]}
    native = {("big", "gsm8k"): [Item("95", 0.0, 1.0, "8"), Item("96", 0.0, 1.0, "6")]}
    found = row(controls(controlled(tmp_path, injected=injected, native=native)), system="native_injected")
    assert (found["items_differing"], found["items_differing_n"]) == (1, 22)


def test_a_run_without_controls_has_no_such_table(tmp_path):
    with pytest.raises(KvferryError, match=r"controls\.pairs: no pair has records of its controls"):
        controls(load(build_swept(tmp_path)))


def test_a_control_on_other_items_is_refused(tmp_path):
    others = {(RANDOM_MAPPER, "hellaswag"): accuracy_items(3, n=7)}
    with pytest.raises(KvferryError, match=r"random_mapper/hellaswag\.json: hellaswag was answered on different items"):
        controls(controlled(tmp_path, others))


def test_the_place_of_a_missing_control_is_named(tmp_path):
    results = controlled(tmp_path, injected={(IDENTITY, "hellaswag"): few_items(17)})
    (pair,) = results.pairs
    assert record_of(results, pair, IDENTITY, "hellaswag")[0] == "records/identity/big/hellaswag.json"
    with pytest.raises(KvferryError, match=r"records/native_injected/big/mmlu\.json: there is no such record"):
        record_of(results, pair, NATIVE_INJECTED, "mmlu")


HELD = ("piqa", "boolq", "arc_easy")


def held_out(tmp_path, names=HELD, pairs=None):
    results = Results.load(build_swept(tmp_path), SWEPT_CONFIG, pairs or PAPER_PAIRS)
    native = {(model, name): accuracy_items(CORRECT[model]) for model in ("big", "small") for name in names}
    transfers = {("ridge_k8", name): accuracy_items(CORRECT["ridge_k8"]) for name in names}
    return with_records(results, transfers, {}, native, names)


def test_held_out_retention_with_its_mean_and_the_papers_beside_it(tmp_path):
    frame = table18_held_out(held_out(tmp_path))
    assert frame["system"].tolist() == ["source alone", "ridge_k8"]
    found = row(frame, system="ridge_k8")
    for name in (*HELD, "mean"):
        assert found[name] == pytest.approx(100 * 75 / 90)
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]
    assert [found[f"{name}_paper"] for name in (*HELD, "mean")] == [98.0, 101.9, 99.8, 99.9]
    assert (found["piqa_n"], found["gap_recovered"]) == (100, pytest.approx(50))
    alone = row(frame, system="source alone")
    assert (alone["mean"], alone["mean_paper"], alone["k"]) == (pytest.approx(100 * 60 / 90), None, None)
    assert "PIQA (n=100)" in readable(frame)[0].columns


def test_a_mean_of_held_out_benchmarks_needs_all_three(tmp_path):
    frame = table18_held_out(held_out(tmp_path, ("boolq",)))
    assert list(frame["mean"]) == ["undefined"] * 2
    assert frame.loc[0, "mean_reason"] == "an average needs all 3 benchmarks, and these were not run: piqa, arc_easy"
    assert frame.loc[1, "gap_recovered"] == "undefined"
    assert "piqa" not in frame
    with pytest.raises(KvferryError, match=r"evaluation\.benchmarks: none of piqa, boolq, arc_easy was run"):
        table18_held_out(held_out(tmp_path, ()))


def test_no_paper_beside_another_k(tmp_path):
    results = held_out(tmp_path, pairs={PAIR: PAPER_PAIRS[PAIR] | {"paper": "Qwen3 8B→32B"}})
    assert table18_held_out(results)["mean_paper"].isna().all()


COSINES = {"ridge_k1": 0.8, "k2": 0.97, "ridge_k8": 0.95, "all": 0.97}


def cosines(**changes):
    return {
        (name, ATTENTION_COSINE_HELD_OUT): [Item(f"text-{i}-ab", value + 0.01 * i) for i in range(3)]
        for name, value in (COSINES | changes).items()
    }


def test_k_by_three_rules_with_what_each_choice_gives(tmp_path):
    results = with_records(load(build_swept(tmp_path)), cosines())
    frame = k_choice(results)
    assert frame["k"].tolist() == [FULL, 2, 8]
    assert frame["system"].tolist() == ["all", "k2", "ridge_k8"]
    assert frame["mean_accuracy"].tolist() == pytest.approx([75, 65, 75])
    assert frame["next_token_kl"].tolist() == pytest.approx([0.25, 0.3, 0.2])
    assert (set(frame["next_token_kl_n"]), set(frame["mean_accuracy_n"])) == ({12}, {60})


def test_kl_is_shown_on_the_chunks_that_it_was_not_chosen_on(tmp_path):
    even_alone = {("k2", "next_token_kl"): chunk_items(0.01, 9.0)}
    frame = k_choice(with_records(load(build_swept(tmp_path)), even_alone))
    found = row(frame, rule="next-token KL, even chunks")
    assert (found["k"], found["next_token_kl"]) == (2, pytest.approx(9.0))


def test_a_rule_that_was_not_measured_is_empty_and_one_in_part_is_undefined(tmp_path):
    results = load(build_swept(tmp_path))
    frame = k_choice(results)
    found = row(frame, rule="attention cosine, held out")
    assert [found[name] for name in ("k", "system", "mean_accuracy", "next_token_kl")] == [None] * 4
    part = {key: items for key, items in cosines().items() if key[0] != "all"}
    found = row(k_choice(with_records(results, part)), rule="attention cosine, held out")
    assert (found["k"], found["mean_accuracy"]) == ("undefined", None)
    assert "not measured on every variant" in found["k_reason"]
    write_table(frame, tmp_path / "k_choice")
    assert "nan" not in (tmp_path / "k_choice.md").read_text().lower()


def test_the_papers_rule_needs_one_of_its_benchmarks(tmp_path):
    bare = {**SWEPT_CONFIG["sweeps"], "k": SWEPT_CONFIG["sweeps"]["k"] | {"benchmarks": {}}}
    frame = k_choice(load(build_swept(tmp_path), SWEPT_CONFIG | {"sweeps": bare}))
    assert (frame.loc[0, "k"], frame.loc[2, "k"]) == ("undefined", 8)
    assert (frame.loc[2, "mean_accuracy"], frame.loc[2, "mean_accuracy_n"]) == ("undefined", None)


def anchored(tmp_path, pairs, benchmarks=("hellaswag",)):
    """The coupled map of one layer among the components, and the target's own cache on all five benchmarks."""
    results, name = Results.load(build_swept(tmp_path), SWEPT_CONFIG, pairs), "coupled_k1"
    component = replace(results.sweeps["components"], variants=["ridge_k8", name])
    results = replace(
        results,
        variants=[*results.variants, name],
        manifests={**results.manifests, (PAIR, name): swept_manifest(1, {"rope": "coupled"})},
        sweeps={**results.sweeps, "components": component},
    )
    transfers = {(name, each): accuracy_items(36) for each in benchmarks}
    injected = {(NATIVE_INJECTED, each): accuracy_items(90) for each in results.benchmarks}
    return with_records(results, transfers, injected)


FIVE = ("arc_challenge", "hellaswag", "winogrande", "mmlu", "gsm8k")


def test_anchors_are_the_target_itself_and_a_map_stripped_of_its_parts(tmp_path):
    frame = table14_anchors(anchored(tmp_path, PAPER_PAIRS, FIVE))
    assert frame["anchor"].tolist() == ["ground-truth cache", "without RoPE and cross-layer"]
    assert frame["of"].tolist() == ["big", PAIR]
    assert frame["avg"].tolist() == pytest.approx([100, 40])
    assert frame["avg_floor_normalised"].tolist()[0] == pytest.approx(100)
    assert frame["avg_floor_normalised"].tolist()[1] < 30
    assert frame["avg_paper"].tolist() == [99.9, None]
    assert frame["gsm8k_paper"].tolist() == [99.3, None]


def test_the_papers_second_anchor_stands_beside_its_own_pair(tmp_path):
    pairs = {PAIR: PAPER_PAIRS[PAIR] | {"paper": "Qwen3 8B→32B"}}
    frame = table14_anchors(anchored(tmp_path, pairs, FIVE))
    assert frame["avg_paper"].tolist() == [99.9, 35.1]
    assert frame["avg_floor_normalised_paper"].tolist() == [99.9, -0.5]
    pairs = {PAIR: PAPER_PAIRS[PAIR] | {"paper": "Llama 3.1 8B→70B"}}
    assert table14_anchors(anchored(tmp_path, pairs, FIVE))["avg_paper"].isna().all()


def test_an_anchor_that_answered_in_part_has_no_average(tmp_path):
    frame = table14_anchors(anchored(tmp_path, PAPER_PAIRS))
    assert (frame.loc[1, "avg"], frame.loc[1, "hellaswag"]) == ("undefined", pytest.approx(40))
    assert "not run: ARC-C, WinoGrande, MMLU, GSM8K" in frame.loc[1, "avg_reason"]
    assert frame.loc[1, "mmlu"] is None


def test_anchors_need_one_of_the_two(tmp_path):
    results = with_records(load(build_swept(tmp_path)), injected={})
    with pytest.raises(KvferryError, match=r"sweeps\.components: no variant is coupled with k = 1"):
        table14_anchors(results)


def test_all_of_them_are_written_without_nan(tmp_path):
    for make, results in (
        (controls, controlled(tmp_path / "a")),
        (table18_held_out, held_out(tmp_path / "b")),
        (table14_anchors, anchored(tmp_path / "c", PAPER_PAIRS)),
    ):
        write_table(make(results), tmp_path / "t")
        assert "nan" not in (tmp_path / "t.md").read_text().lower()
        assert not set("λ→²×−–") & set((tmp_path / "t.tex").read_text())
