"""The paper's claims: that all can be looked up, what the rules say, and which pairs and recipes a number is held against."""

import json

import pytest
import yaml
from test_report_inputs import (
    CONFIG,
    PAIRS,
    PAPER_PAIRS,
    accuracy_items,
    build,
    write_json,
    write_measures,
    write_transfer,
)
from test_report_papers_recipe import change
from test_report_sweeps import PAIR, PAPERS_MLP, SWEPT_CONFIG, build_swept, few_items, load

from kvferry.errors import KvferryError
from kvferry.report.claims import NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, Rule, read_claims
from kvferry.report.inputs import Results
from kvferry.report.paper import PAPER_ROOT, Paper
from kvferry.report.tables import TABLES, evidence
from kvferry.report.tables.render import readable
from kvferry.report.tables.reproduction import reproduction

CLAIMS = read_claims(PAPER_ROOT)
BY_ID = {claim.id: claim for claim in CLAIMS}


def rows(results, claim):
    frame = reproduction(results)
    return frame[frame["id"] == claim].to_dict("records")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_every_claim_can_be_looked_up_and_tested(claim):
    numbers = claim.papers_numbers(Paper())
    assert bool(numbers) == claim.rule.is_number == ("words" not in claim.paper)
    if "table" in claim.ours:
        assert claim.ours["table"] in evidence.TABLES
        assert evidence.TABLES[claim.ours["table"]] is TABLES[claim.ours["table"]]
    else:
        assert claim.ours["measure"] in evidence.MEASURES
    assert set(numbers) <= {*Paper().table("pairs").index, evidence.ALL_TWELVE}


@pytest.mark.parametrize(
    ("claim", "pair", "number"),
    [
        ("retention", "Llama 3.1 8B→70B", 72.8),
        ("rope-put-back-number", "Qwen3 14B→32B", 75.39 - 80.70),
        ("fifty-sequences", "Qwen3 14B→32B", 79.09 - 80.73),
        ("code-number", "Qwen3 14B→32B", 75.46 - 80.70),
        ("stripped-down", "Qwen3 8B→32B", 35.1),
        ("r2-v-all", "Qwen3 14B→32B", 0.7645),
        ("both-directions", "Llama 3.1 70B→8B", 37),
        ("cosine-correlation", evidence.ALL_TWELVE, 0.57),
    ],
)
def test_the_papers_numbers_are_those_of_its_tables(claim, pair, number):
    assert BY_ID[claim].papers_numbers(Paper())[pair] == pytest.approx(number)


@pytest.mark.parametrize(
    ("kind", "bound", "interval", "verdict"),
    [
        ("within", 2, (95.7, 99.5), REPRODUCED),
        ("within", 2, (90.0, 95.5), NOT_REPRODUCED),
        ("within", 2, (95.0, 97.0), UNDECIDED),
        ("within", 2, (90.0, 105.0), UNDECIDED),
        ("within", 0, (97.6, 97.6), REPRODUCED),
        ("above", 0, (0.1, 0.2), REPRODUCED),
        ("above", 0, (0.0, 0.0), NOT_REPRODUCED),
        ("above", 0, (-0.1, 0.2), UNDECIDED),
        ("below", 1, (-3.0, 0.9), REPRODUCED),
        ("below", 1, (1.0, 2.0), NOT_REPRODUCED),
        ("at_most", 0.05, (-0.05, 0.05), REPRODUCED),
        ("at_most", 0.05, (-0.2, -0.1), NOT_REPRODUCED),
        ("at_most", 0.05, (0.0, 0.1), UNDECIDED),
        ("at_most", 0, (0.0, 0.0), REPRODUCED),
    ],
)
def test_a_verdict_is_on_the_whole_interval(kind, bound, interval, verdict):
    assert Rule(kind, bound).verdict(*interval, paper=97.6) == verdict


def test_numbers_of_pairs_that_were_not_run_are_shown_and_not_judged(tmp_path):
    (found,) = rows(load(build(tmp_path), CONFIG), "retention")
    assert (found["verdict"], found["ours"], found["pair"]) == (NOT_RUN, None, None)
    assert "97.6 (Qwen3 14B→32B)" in found["paper"]
    assert "41.6 (Ministral 3 8B→14B)" in found["paper"]


def test_a_number_is_held_against_the_papers_pair(tmp_path):
    found = rows(load(build(tmp_path), CONFIG, PAPER_PAIRS), "retention-hellaswag")
    own, *others = found
    assert (own["pair"], own["paper"], own["verdict"]) == (PAIR, 97.6, NOT_REPRODUCED)
    assert own["ours"] == pytest.approx(100 * 75 / 90)
    assert own["difference"] == pytest.approx(own["ours"] - 97.6)
    assert own["ours_low"] < own["ours"] < own["ours_high"]
    assert own["ours_n"] == 100
    assert {(row["verdict"], row["note"]) for row in others} == {(NOT_RUN, "this pair was not run")}
    write_transfer(tmp_path, "ridge_k8", "hellaswag", accuracy_items(88))
    (own, *_) = rows(load(tmp_path, CONFIG, PAPER_PAIRS), "retention-hellaswag")
    assert own["verdict"] == UNDECIDED  # 97.8 % of 100 items: the interval is wider than the tolerance


def test_a_number_is_not_held_against_another_recipe(tmp_path):
    build(tmp_path)
    change(tmp_path, "ridge_k8", native_head=4)
    by_pair = {row["pair"]: row for row in rows(load(tmp_path, CONFIG, PAPER_PAIRS), "retention")}
    assert by_pair["Qwen3 14B→32B"]["verdict"] == NOT_RUN
    assert by_pair["Qwen3 14B→32B"]["note"] == "run, but not with what the claim needs"


def test_where_the_paper_states_no_k_any_is_held_against_it(tmp_path):
    pairs = {PAIR: PAIRS[PAIR] | {"paper": "Ministral 3 8B→3B"}}
    own, *_ = rows(load(build(tmp_path), CONFIG, pairs), "both-directions")
    assert (own["pair"], own["paper"], own["verdict"]) == (PAIR, 93, NOT_REPRODUCED)


def test_other_claims_are_tested_on_whatever_ran_and_say_whose_it_is(tmp_path):
    results = load(build_swept(tmp_path))
    (found,) = rows(results, "rope-put-back")
    assert (found["verdict"], found["pair"], found["papers_pair"], found["ours_n"]) == (REPRODUCED, PAIR, "no", 24)
    assert found["ours"] == pytest.approx(1.3)
    (found,) = rows(load(tmp_path, SWEPT_CONFIG, PAPER_PAIRS), "rope-put-back")
    assert found["papers_pair"] == "yes"


def test_a_claim_can_fail_and_can_stay_open(tmp_path):
    build_swept(tmp_path)
    write_measures(tmp_path, "unturned", 2.0, 0.1)
    assert [row["verdict"] for row in rows(load(tmp_path), "rope-put-back")] == [NOT_REPRODUCED]
    uneven = json.loads((tmp_path / f"records/pairs/{PAIR}/ridge_k8/next_token_kl.json").read_text())["items"]
    for number, item in enumerate(uneven):
        item["score"] += 0.5 if number % 2 else -0.5
    path = tmp_path / f"records/pairs/{PAIR}/unturned/next_token_kl.json"
    record = json.loads(path.read_text())
    write_json(path, record | {"items": uneven, "value": sum(item["score"] for item in uneven) / len(uneven)})
    assert [row["verdict"] for row in rows(load(tmp_path), "rope-put-back")] == [UNDECIDED]


def test_a_claim_whose_variants_were_not_run_says_so(tmp_path):
    (found,) = rows(load(build(tmp_path), CONFIG), "rope-put-back")
    assert (found["verdict"], found["note"]) == (
        NOT_RUN,
        "no pair has the variants that it compares in sweeps.components",
    )


def test_only_an_mlp_of_the_papers_size_speaks_of_its_mlp(tmp_path):
    build_swept(tmp_path)
    (found,) = rows(load(tmp_path), "mlp-not-better")
    assert (found["verdict"], found["ours"]) == (NOT_REPRODUCED, pytest.approx(-0.05))
    change(tmp_path, "mlp_k8", mlp=PAPERS_MLP | {"width": 64})
    (found,) = rows(load(tmp_path), "mlp-not-better")
    assert (found["verdict"], found["note"]) == (NOT_RUN, "no mapper of the paper's size with method mlp")


def test_what_was_run_comes_first_and_every_claim_has_a_row(tmp_path):
    frame = reproduction(load(build_swept(tmp_path)))
    assert set(frame["id"]) == set(BY_ID)
    not_run = (frame["verdict"] == NOT_RUN).tolist()
    assert not_run == sorted(not_run)
    assert 0 < sum(not_run) < len(not_run)
    shown, _ = readable(frame)
    assert "ours − paper" not in shown.columns  # no pair is the paper's


def test_an_undefined_value_is_undecided_with_its_reason(tmp_path):
    build_swept(tmp_path)
    for name in SWEPT_CONFIG["sweeps"]["k"]["variants"]:
        write_transfer(tmp_path, name, "hellaswag", few_items(0))
    pairs, config = PAPER_PAIRS, SWEPT_CONFIG | {"evaluation": CONFIG["evaluation"]}
    build_target_that_is_never_right(tmp_path)
    own, *_ = rows(Results.load(tmp_path, config, pairs), "retention-hellaswag")
    assert (own["ours"], own["verdict"]) == ("undefined", UNDECIDED)
    assert own["ours_reason"] == "the target scores 0"


def build_target_that_is_never_right(root):
    for system in ("native", "native_injected"):
        path = root / f"records/{system}/big/hellaswag.json"
        record = json.loads(path.read_text())
        items = [item | {"score": 0.0} for item in record["items"]]
        write_json(path, record | {"items": items, "value": 0.0})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rule": {"near": 2}}, r"claims\[0\]: not a claim \(rule.near is none of within, above, below, at_most\)"),
        ({"rule": {}}, r"claims\[0\]: not a claim"),
        ({"clam": "x"}, r"claims\[0\]: not a claim .*clam"),
        ({"ours": {"table": "table99", "column": "x"}}, "can refer to the table 'table99'"),
        ({"ours": {"measure": "guess"}}, "there is no measure 'guess'"),
        ({"ours": {"table": "table1_retention", "column": "avg", "where": {"sistem": "x"}}}, "no column 'sistem'"),
    ],
)
def test_a_wrong_claim_is_refused_in_one_sentence(tmp_path, wrong, said):
    paper = tmp_path / "paper"
    paper.mkdir()
    for file in PAPER_ROOT.glob("*.csv"):
        (paper / file.name).write_text(file.read_text())
    entry = yaml.safe_load((PAPER_ROOT / "claims.yaml").read_text())["claims"][0]
    (paper / "claims.yaml").write_text(yaml.safe_dump({"claims": [entry | wrong]}))
    results = Results.load(build(tmp_path), CONFIG, PAIRS, paper)
    with pytest.raises(KvferryError, match=said):
        reproduction(results)


def test_an_id_is_there_once(tmp_path):
    entry = yaml.safe_load((PAPER_ROOT / "claims.yaml").read_text())["claims"][0]
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump({"claims": [entry, entry]}))
    with pytest.raises(KvferryError, match="'retention' is there twice"):
        read_claims(tmp_path)
