"""Drift by turn: what is compared with what, intervals over conversations, and a choice that no conversation makes for itself."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from kvferry.errors import KvferryError
from kvferry.records import COQA, COQA_ALTERNATE, COQA_HANDOFF, Item, Record
from kvferry.report import style
from kvferry.report.drift import CHOSEN, cross_fitted, drift_by_turn, f1_by_turn, lines, slope_weights, summary
from kvferry.report.figures.coqa import curves, fig4_coqa_drift
from kvferry.report.inputs import Pair
from kvferry.report.stats import Undefined
from kvferry.report.tables.coqa import coqa_drift
from kvferry.report.tables.render import readable, write_table

PAIR, BACK = Pair("small-to-big", "small", "big"), Pair("big-to-small", "big", "small")
CONVERSATIONS, TURNS, DRAWS = 12, 10, 300
VARIANTS = ("k8", "k1", "k4")
RNG = np.random.default_rng(5)
SCORES = {name: RNG.random((CONVERSATIONS, TURNS)) for name in ("big", "small", *VARIANTS)}
SCORES |= {f"{name} alternates": RNG.random((CONVERSATIONS, TURNS)) for name in VARIANTS}


def record(scores, benchmark=COQA):
    items = [Item(f"c_{n}/{t + 1}", float(own)) for n, row in enumerate(scores) for t, own in enumerate(row)]
    return Record("x", "big", benchmark, "f1", items)


def results(scores=None, pairs=(PAIR,), variants=VARIANTS, protocols=(COQA_HANDOFF, COQA_ALTERNATE)):
    """What the functions take of results; scores by model and variant override those above."""
    scores = SCORES | (scores or {})
    names = {COQA_HANDOFF: "{}", COQA_ALTERNATE: "{} alternates"}
    transfers = {
        (pair.name, name, each): record(scores[names[each].format(name)], each)
        for pair in pairs
        for name in variants
        for each in protocols
    }
    native = {(model, COQA): record(scores[model]) for model in ("big", "small")}
    coqa = {pair.name: variants for pair in pairs}
    return SimpleNamespace(
        pairs=[PAIR, BACK],
        headline=lambda pair: "k8",
        headline_names="k8",
        draws=DRAWS,
        seed=0,
        native=native,
        transfers=transfers,
        dialogues=coqa,
    )


def line(own, system, protocol="handoff", pair=PAIR):
    return next(each for each in lines(own, pair, protocol) if each.system == system)


def values(sampled):
    return [each.value for each in sampled]


def test_in_a_hand_off_drift_is_the_targets_own_score_less_the_mapped_one():
    own = results()
    assert values(f1_by_turn(own, line(own, "k1"))) == pytest.approx(SCORES["k1"].mean(0))
    drift = drift_by_turn(own, line(own, "k1"))
    assert values(drift) == pytest.approx((SCORES["big"] - SCORES["k1"]).mean(0))
    assert drift_by_turn(own, line(own, "target")) is None
    assert values(drift_by_turn(own, line(own, "source alone"))) == pytest.approx(
        (SCORES["big"] - SCORES["small"]).mean(0)
    )


@pytest.mark.parametrize(("pair", "first", "second"), [(PAIR, "small", "big"), (BACK, "big", "small")])
def test_in_turns_each_is_compared_with_the_model_that_answers_it(pair, first, second):
    own = results(pairs=[PAIR, BACK])
    drift = drift_by_turn(own, line(own, "k1", "alternate", pair))
    for turn in range(TURNS):
        alone = SCORES[second if turn % 2 else first][:, turn]
        assert drift[turn].value == pytest.approx((alone - SCORES["k1 alternates"][:, turn]).mean())


@pytest.mark.parametrize(("protocol", "first"), [("handoff", 0), ("alternate", 1)])
def test_the_slope_is_that_of_a_regression_over_turns_that_read_something_mapped(protocol, first):
    own = results()
    chosen = line(own, "k1", protocol)
    means = values(drift_by_turn(own, chosen))[first:]
    found = summary(own, chosen)
    assert found.slope.value == pytest.approx(scipy_stats.linregress(range(first, TURNS), means).slope)
    assert found.drift.value == pytest.approx(np.mean(chosen.reference - chosen.scores))
    assert found.f1.value == pytest.approx(chosen.scores.mean())


def test_slope_weights_find_a_slope_whatever_the_level_and_what_is_left_out():
    for turns, first in ((2, 0), (10, 0), (10, 1), (3, 1)):
        line = 7 + 0.25 * np.arange(turns)
        line[:first] = 99
        assert line @ slope_weights(turns, first) == pytest.approx(0.25)


def test_what_is_below_the_target_by_the_same_everywhere_has_a_drift_without_width():
    own = results({"k1": SCORES["big"] - 0.1})
    for drift in (*drift_by_turn(own, line(own, "k1")), summary(own, line(own, "k1")).drift):
        assert drift.interval() == pytest.approx((0.1, 0.1))
    assert summary(own, line(own, "k1")).slope.interval() == pytest.approx((0, 0), abs=1e-12)


def test_conversations_are_resampled_whole():
    """With turns that are all alike in a conversation, ten of them say no more than one."""
    alike = np.repeat(RNG.random((CONVERSATIONS, 1)), TURNS, axis=1)
    own = results({"k1": alike})
    one, whole = f1_by_turn(own, line(own, "k1"))[0], summary(own, line(own, "k1")).f1
    assert whole.draws == pytest.approx(one.draws)
    spread = alike[:, 0].std() / np.sqrt(CONVERSATIONS)
    assert whole.draws.std() == pytest.approx(spread, rel=0.2)


def halves(even, odd):
    scores = np.empty((CONVERSATIONS, TURNS))
    scores[0::2], scores[1::2] = even, odd
    return scores


def test_each_half_is_reported_with_the_choice_of_the_other():
    own = results({"k8": halves(0.9, 0.2), "k1": halves(0.1, 0.8), "k4": halves(0.3, 0.3)})
    chosen = line(own, CHOSEN)
    # even conversations take what is best on odd ones (k1), odd ones what is best on even ones (k8)
    assert chosen.variants == ("k1", "k8")
    assert np.array_equal(chosen.scores, halves(0.1, 0.2))


def test_no_conversation_has_a_say_in_its_own_choice():
    before = line(results(), CHOSEN)
    for number in range(CONVERSATIONS):
        scores = {name: SCORES[name].copy() for name in VARIANTS}
        scores[VARIANTS[number % 3]][number] = 1.0
        scores[VARIANTS[(number + 1) % 3]][number] = 0.0
        after = line(results(scores), CHOSEN)
        assert after.variants[number % 2] == before.variants[number % 2]


def test_equal_variants_give_the_first_named():
    own = results(dict.fromkeys(VARIANTS, SCORES["k8"]))
    assert line(own, CHOSEN).variants == ("k8", "k8")


def test_too_few_conversations_or_turns_are_said_so():
    one = {name: own[:1] for name, own in SCORES.items()}
    with pytest.raises(KvferryError, match=r"coqa\.conversations: choosing on half of them needs at least two"):
        lines(results(one), PAIR, "handoff")
    short = {name: own[:, :2] for name, own in SCORES.items()}
    own = results(short)
    assert isinstance(summary(own, line(own, "k1", "alternate")).slope, Undefined)
    assert not isinstance(summary(own, line(own, "k1")).slope, Undefined)


def test_a_conversation_without_some_turns_is_refused():
    own = results()
    for table in (own.native, own.transfers):
        for key, each in table.items():
            table[key] = Record("x", "big", each.benchmark, "f1", each.items[:-1])
    with pytest.raises(
        KvferryError, match=r"native/big/coqa\.json: its conversations do not all have the turns 1 to 10"
    ):
        lines(own, PAIR, "handoff")


def test_a_record_of_other_conversations_is_refused():
    own = results()
    key = PAIR.name, "k1", COQA_HANDOFF
    own.transfers[key] = Record("x", "big", COQA_HANDOFF, "f1", [Item("other/1", 1.0)])
    with pytest.raises(KvferryError, match="was answered on different items"):
        lines(own, PAIR, "handoff")
    del own.transfers[key]
    with pytest.raises(KvferryError, match=r"k1/coqa_handoff\.json: there is no such record"):
        lines(own, PAIR, "handoff")


def test_the_table_has_all_systems_of_both_protocols(tmp_path):
    frame = coqa_drift(results(pairs=[BACK, PAIR]))
    assert list(dict.fromkeys(frame["pair"])) == ["small-to-big", "big-to-small"]
    own = frame[frame["pair"] == PAIR.name]
    assert own["system"].tolist() == [
        *("target", "source alone", *VARIANTS, CHOSEN),
        *("target", "source alone", "answering model alone", *VARIANTS, CHOSEN),
    ]
    assert set(own["conversations"]) == {CONVERSATIONS}
    assert set(own["turns"]) == {TURNS}
    row = own[(own["system"] == "k1") & (own["protocol"] == "handoff")].iloc[0]
    assert row["coqa_f1"] == pytest.approx(100 * SCORES["k1"].mean())
    assert row["coqa_f1_low"] < row["coqa_f1"] < row["coqa_f1_high"]
    assert row["coqa_drift"] == pytest.approx(100 * (SCORES["big"] - SCORES["k1"]).mean())
    assert own.loc[own["system"] == "target", ["coqa_drift", "coqa_slope"]].isna().all(axis=None)
    assert own.loc[own["system"] != CHOSEN, "chosen"].isna().all()
    assert own.loc[own["system"] == CHOSEN, "chosen"].notna().all()
    shown, _ = readable(frame)
    assert {"F1, %", "drift, points", "drift slope, points/turn"} <= set(shown.columns)
    write_table(frame, tmp_path / "coqa_drift")


@pytest.fixture
def saved(monkeypatch):
    """Figures as they are when they are saved."""
    figures, save = [], style.save
    monkeypatch.setattr(style, "save", lambda figure, *rest: (figures.append(figure), save(figure, *rest)))
    return figures


def test_panels_draw_the_csv(tmp_path, saved):
    fig4_coqa_drift(results(pairs=[PAIR, BACK]), tmp_path / "fig4")
    drawn = pd.read_csv(tmp_path / "fig4.csv")
    panels = iter(saved[0].axes)
    for protocol in ("handoff", "alternate"):
        for pair in (PAIR, BACK):
            ax, own = next(panels), drawn[(drawn["pair"] == pair.name) & (drawn["protocol"] == protocol)]
            assert f"n = {CONVERSATIONS} conversations" in ax.get_title()
            systems = list(dict.fromkeys(own["system"]))
            for curve, system in zip(ax.get_lines(), systems, strict=True):
                rows = own[own["system"] == system]
                assert curve.get_xdata().tolist() == rows["turn"].tolist()
                assert curve.get_ydata().tolist() == pytest.approx(rows["f1"].tolist())
            marked = [curve.get_markevery() for curve in ax.get_lines()[:2]]
            odd, even = list(range(0, TURNS, 2)), list(range(1, TURNS, 2))
            assert marked == ([list(range(TURNS)), []] if protocol == "handoff" else [even, odd])
    assert [curve.get_linestyle() for curve in ax.get_lines()] == ["-", ":", "--", "-."]
    assert ax.get_xlabel() == "turn of the conversation"
    assert "95 % bootstrap over conversations" in saved[0].get_suptitle().replace("\n", " ")
    row = drawn[(drawn["system"] == "single-turn variant") & (drawn["turn"] == 3)].iloc[0]
    assert row["variant"] == "k8"
    assert row["drift"] == pytest.approx(100 * (SCORES["big"] - SCORES["k8"])[:, 2].mean())


def test_a_pair_without_an_alternating_record_has_an_empty_panel(tmp_path, saved):
    own = results(pairs=[PAIR, BACK])
    own.transfers = {key: each for key, each in own.transfers.items() if key[0] != BACK.name or key[2] == COQA_HANDOFF}
    fig4_coqa_drift(own, tmp_path / "fig4")
    assert [ax.axison for ax in saved[0].axes] == [True, True, True, False]


def test_without_the_headline_or_any_pair_there_is_no_figure(tmp_path):
    with pytest.raises(KvferryError, match=r"coqa\.variants: small-to-big lacks the headline k8"):
        curves(results(variants=("k1", "k4")))
    with pytest.raises(KvferryError, match="no pair of this configuration answers CoQA"):
        fig4_coqa_drift(results(pairs=[]), tmp_path / "fig4")


def test_a_choice_needs_no_more_than_lines():
    assert cross_fitted(lines(results(), PAIR, "handoff")[2:-1]).system == CHOSEN
