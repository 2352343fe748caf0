"""Tables of diagnostics from made-up records: values, what an MLP gains, and correlations against numpy."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from test_report_inputs import CONFIG, PAPER_PAIRS, accuracy_items, build, write_native
from test_report_sweeps import PAIR, build_swept, load

from kvferry.errors import KvferryError
from kvferry.records import Item, Record, read_record
from kvferry.report import style
from kvferry.report.correlation import pearson, spearman
from kvferry.report.diagnosis import by_layer, diagnosed, mean_of, sampled
from kvferry.report.figures.correlation import fig10_correlation
from kvferry.report.inputs import Pair
from kvferry.report.stats import Undefined
from kvferry.report.tables.diagnostics import (
    _scopes,
    correlations,
    diagnostics_by_layer,
    points,
    table4_error_placement,
)
from kvferry.report.tables.render import readable, write_table

OWN = Pair(PAIR, "small", "big")
DIAGNOSED = ("ridge_k8", "k2", "mlp_k8", "head4", "unturned")
TEXTS, LAYERS = 6, 3
OVER_TEXTS = ("attention_cosine", "attention_cosine_held_out", "k_concentration", "v_concentration")


def values(variant, name):
    """Made-up values `[texts, layers]` of a measure."""
    seed = sum(map(ord, variant + name))
    return np.random.default_rng(seed).uniform(0.2, 1.0, (TEXTS, LAYERS))


def diagnostics(variant):
    """The records of one variant."""
    for name in (*OVER_TEXTS, "r2_k", "r2_v"):
        rows = values(variant, name)
        items = [Item(f"text-{n}", float(np.mean(row)), response=row.tolist()) for n, row in enumerate(rows)]
        metric = name
        if name.startswith("r2"):
            items, metric = [Item(f"layer-{n:02d}", float(v)) for n, v in enumerate(rows[0])], "r2"
        record = Record(variant, "big", name, metric, items, pair=PAIR, source="small")
        yield (PAIR, variant, name), record


def with_diagnostics(results, variants=DIAGNOSED):
    added = {key: record for variant in variants for key, record in diagnostics(variant)}
    return replace(results, transfers=dict(results.transfers) | added)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return build_swept(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def results(root):
    return with_diagnostics(load(root))


@pytest.fixture
def saved(monkeypatch):
    """Figures as they are when they are saved."""
    figures, save = [], style.save
    monkeypatch.setattr(style, "save", lambda figure, *rest: (figures.append(figure), save(figure, *rest)))
    return figures


def test_means_and_layers_are_those_of_the_records(results):
    assert diagnosed(results, OWN) == ["ridge_k8", "k2", "unturned", "mlp_k8", "head4"]  # order of the configuration
    cosine = values("k2", "attention_cosine")
    assert mean_of(results, OWN, "k2", "attention_cosine") == pytest.approx(cosine.mean())
    assert by_layer(results, OWN, "k2", "attention_cosine") == pytest.approx(cosine.mean(0))
    assert by_layer(results, OWN, "k2", "r2_v") == pytest.approx(values("k2", "r2_v")[0])
    own = sampled(results, OWN, "k2", "attention_cosine")
    low, high = own.interval()
    assert cosine.mean(1).min() < low < own.value < high < cosine.mean(1).max()


def test_layers_without_a_value_are_left_out_of_their_means_and_empty_in_the_table(results, tmp_path):
    key = (PAIR, "k2", "v_concentration")
    rows = [[None, 1.0, 2.0], [None, None, 4.0]]
    items = [Item(f"text-{n}", 2.0, response=row) for n, row in enumerate(rows)]
    replace(results.transfers[key], items=items).write(tmp_path / "record.json")
    changed = replace(results, transfers=results.transfers | {key: read_record(tmp_path / "record.json")})
    assert by_layer(changed, OWN, "k2", "v_concentration") == [None, 1.0, 3.0]
    frame = diagnostics_by_layer(changed)
    assert frame.loc[frame["system"] == "k2", "v_concentration"].tolist() == [None, 1.0, 3.0]


@pytest.mark.parametrize("response", [None, [], [0.5]])
def test_items_without_values_by_layer_are_refused(results, response):
    key = (PAIR, "k2", "attention_cosine")
    record = results.transfers[key]
    items = [*record.items[1:], replace(record.items[0], response=response)]
    spoilt = replace(results, transfers=results.transfers | {key: replace(record, items=items)})
    with pytest.raises(KvferryError, match=r"k2/attention_cosine\.json: its items hold no values by layer"):
        by_layer(spoilt, OWN, "k2", "attention_cosine")


def test_a_mapper_that_was_not_diagnosed_is_said_to_be_missing(results):
    with pytest.raises(KvferryError, match=r"few/r2_k\.json: there is no such record"):
        mean_of(results, OWN, "few", "r2_k")


def test_table_4_has_every_diagnosed_mapper(results):
    frame = table4_error_placement(results).set_index("system")
    assert frame.index.tolist() == diagnosed(results, OWN)
    for system, row in frame.iterrows():
        for name in ("r2_k", "r2_v"):
            assert row[name] == pytest.approx(values(system, name)[0].mean())
        for name in OVER_TEXTS:
            assert row[name] == pytest.approx(values(system, name).mean())
            assert row[f"{name}_low"] < row[name] < row[f"{name}_high"]
            assert row[f"{name}_n"] == TEXTS
    assert frame.loc["k2", ["hellaswag_retention", "hellaswag_retention_n"]].tolist() == pytest.approx([65 / 0.9, 20])


def test_an_mlp_stands_beside_what_it_gains_over_its_ridge_on_the_same_texts(results):
    frame = table4_error_placement(results).set_index("system")
    gains = [name for name in frame if name.endswith("_vs_ridge")]
    assert len(gains) == 6
    assert frame.loc[[name for name in frame.index if name != "mlp_k8"], gains].isna().all(axis=None)
    for name in ("k_concentration", "v_concentration", "attention_cosine"):
        by_text = values("mlp_k8", name).mean(1) - values("ridge_k8", name).mean(1)
        own = frame.loc["mlp_k8", [f"{name}_vs_ridge{end}" for end in ("_low", "", "_high")]].to_numpy(dtype=float)
        assert own[1] == pytest.approx(by_text.mean())
        # Draws of differences of the same texts, not of two sets of texts.
        assert by_text.min() < own[0] < own[1] < own[2] < by_text.max()
    gained = values("mlp_k8", "r2_k")[0].mean() - values("ridge_k8", "r2_k")[0].mean()
    assert frame.loc["mlp_k8", "r2_k_vs_ridge"] == pytest.approx(gained)
    assert frame.loc["mlp_k8", "hellaswag_vs_ridge"] == pytest.approx(10 / 0.9)  # 17 and 15 of 20, target 18


def test_an_mlp_without_a_diagnosed_ridge_gains_nothing(root):
    frame = table4_error_placement(with_diagnostics(load(root), ["k2", "mlp_k8"]))
    assert frame[[name for name in frame if name.endswith("_vs_ridge")]].isna().all(axis=None)


def test_a_run_without_a_sweep_of_mlps_still_has_the_table(tmp_path):
    frame = table4_error_placement(with_diagnostics(load(build(tmp_path), CONFIG), ["ridge_k8"]))
    assert frame["system"].tolist() == ["ridge_k8"]


def test_a_mapper_without_hellaswag_has_no_retention_and_is_no_point(root):
    results = with_diagnostics(load(root), ["ridge_k8", "lambda_0"])
    left = {key: record for key, record in results.transfers.items() if key != (PAIR, "lambda_0", "hellaswag")}
    results = replace(results, transfers=left)
    frame = table4_error_placement(results).set_index("system")
    assert frame.loc["lambda_0", "hellaswag_retention"] is None
    assert points(results)["system"].tolist() == ["ridge_k8"]


def test_the_papers_numbers_stand_beside_its_own_recipes(root):
    frame = table4_error_placement(with_diagnostics(load(root, pairs=PAPER_PAIRS))).set_index("system")
    ridge, mlp, other = (frame.loc[name] for name in ("ridge_k8", "mlp_k8", "head4"))
    assert ridge[["r2_k_paper", "r2_v_paper", "hellaswag_retention_paper"]].tolist() == [0.75, 0.56, 97.6]
    deltas = ["r2_k", "r2_v", "hellaswag", "k_concentration", "v_concentration", "attention_cosine"]
    assert mlp[[f"{name}_vs_ridge_paper" for name in deltas]].tolist() == [-0.05, -0.06, -0.3, -0.03, 0.0, -0.03]
    papers = [name for name in frame if name.endswith("_paper")]
    assert other[papers].isna().all()
    assert mlp[["r2_k_paper", "r2_v_paper"]].isna().all()


def test_layers_have_a_row_each(results):
    frame = diagnostics_by_layer(results)
    assert len(frame) == len(DIAGNOSED) * LAYERS
    own = frame[frame["system"] == "head4"]
    assert own["layer"].tolist() == [0, 1, 2]
    assert own["k_concentration"].tolist() == pytest.approx(values("head4", "k_concentration").mean(0))
    assert own["r2_k"].tolist() == pytest.approx(values("head4", "r2_k")[0])


def test_correlations_are_those_of_the_points(results):
    found, frame = points(results), correlations(results)
    assert found["hellaswag_retention"].tolist() == pytest.approx(
        [15 / 0.18, 13 / 0.18, 5 / 0.18, 17 / 0.18, 16 / 0.18]
    )
    assert found["next_token_kl"].tolist() == pytest.approx([0.2, 0.3, 1.5, 0.15, 0.11])
    assert found["r2_k_held_out"].tolist() == pytest.approx([8 / 30, 2 / 30, 8 / 30, 8 / 30, 8 / 30])
    assert frame["over"].unique().tolist() == ["all pairs", PAIR]
    retention = found["hellaswag_retention"].astype(float)
    for row in frame.to_dict("records"):
        x = found[row["measure"]].astype(float)
        assert row["pearson"] == pytest.approx(np.corrcoef(x, retention)[0, 1])
        assert row["spearman"] == pytest.approx(x.rank().corr(retention.rank()))
        assert (row["pearson_n"], row["left_out"]) == (5, 0)
        assert -1 - 1e-9 <= row["pearson_low"] <= row["pearson"] <= row["pearson_high"] <= 1 + 1e-9
    paper = frame[frame["over"] == "all pairs"].set_index("measure")["pearson_paper"]
    assert paper.dropna().to_dict() == {"attention_cosine": 0.57, "r2_k_held_out": -0.2}


def test_a_retention_that_is_undefined_is_left_out_and_counted(tmp_path, saved):
    write_native(build_swept(tmp_path), "big", "hellaswag", accuracy_items(0))
    results = with_diagnostics(load(tmp_path))
    frame = correlations(results)
    assert frame["left_out"].tolist() == [5] * len(frame)
    assert set(frame["pearson"]) == set(frame["spearman"]) == {"undefined"}
    assert set(frame["pearson_reason"]) == {"a correlation needs at least 3 points"}
    fig10_correlation(results, tmp_path / "fig10")
    assert "(the target scores 0): 5" in " ".join(saved[0].get_suptitle().split())
    assert pd.read_csv(tmp_path / "fig10.csv")["hellaswag_retention"].tolist() == ["undefined"] * 5
    assert [ax.get_title() for ax in saved[0].axes] == ["n = 0 mappers, r undefined"] * 3


def test_two_points_have_no_correlation(root):
    frame = correlations(with_diagnostics(load(root), ["ridge_k8", "k2"]))
    assert set(frame["pearson"]) == {"undefined"}
    assert set(frame["pearson_n"]) == {2}


def test_without_diagnostics_there_are_no_rows_and_no_figure(root, tmp_path):
    results = load(root)
    assert all(make(results).empty for make in (table4_error_placement, diagnostics_by_layer, correlations, points))
    with pytest.raises(KvferryError, match="fig10_correlation: no mapper has both diagnostics and hellaswag"):
        fig10_correlation(results, tmp_path / "fig10")


def test_the_figure_draws_its_csv(results, tmp_path, saved):
    for run in ("one", "two"):
        fig10_correlation(results, tmp_path / run / "fig10")
    for kind in ("pdf", "png", "csv"):
        assert (tmp_path / f"one/fig10.{kind}").read_bytes() == (tmp_path / f"two/fig10.{kind}").read_bytes()
    drawn = pd.read_csv(tmp_path / "one/fig10.csv")
    assert drawn["system"].tolist() == diagnosed(results, OWN)
    for ax, name in zip(saved[0].axes, ("attention_cosine", "r2_k", "next_token_kl"), strict=True):
        (dots,) = (part for part in ax.collections if isinstance(part, PathCollection))
        np.testing.assert_allclose(np.array(dots.get_offsets()), drawn[[name, "hellaswag_retention"]])
        r = np.corrcoef(drawn[name], drawn["hellaswag_retention"])[0, 1]
        assert ax.get_title().replace("−", "-").startswith(f"n = 5 mappers, r = {r:+.2f} [")
    assert "HellaSwag on 20–100 items a mapper" in " ".join(saved[0].get_suptitle().split())


@pytest.mark.parametrize("make", [table4_error_placement, diagnostics_by_layer, correlations])
def test_tables_are_written_without_nan_and_with_words(make, results, tmp_path):
    write_table(make(results), tmp_path / "table")
    text = (tmp_path / "table.md").read_text()
    assert "nan" not in text.lower()
    assert not set("λ→²×−–ρ") & set((tmp_path / "table.tex").read_text())
    shown, _ = readable(make(results))
    assert not any("_" in heading for heading in shown.columns)


def test_concentration_is_rounded_like_a_number_and_not_like_k(results):
    shown, _ = readable(table4_error_placement(results))
    cell = shown["K concentration (n=6)"].iloc[0]
    assert cell.startswith(f"{values('ridge_k8', 'k_concentration').mean():.2f} [")


class TestCorrelation:
    def test_pearson_is_numpys_and_its_draws_resample_points(self):
        rng = np.random.default_rng(1)
        x = rng.normal(size=40)
        y = x + rng.normal(size=40)
        found = pearson(x, y, 4000, [0])
        assert found.value == pytest.approx(np.corrcoef(x, y)[0, 1])
        low, high = found.interval()
        # Fisher's interval: its half width is 1.96 / √(n − 3) on the scale of atanh.
        wanted = np.tanh(np.arctanh(found.value) + np.array([-1.96, 1.96]) / np.sqrt(37))
        assert (low, high) == pytest.approx(wanted, abs=0.08)
        assert pearson(x, y, 4000, [0]).interval() == (low, high)

    def test_spearman_sees_order_alone_and_shares_ranks(self):
        x = np.array([1.0, 2.0, 3.0, 4.0])
        assert spearman(x, np.exp(x)) == pytest.approx(1)
        assert spearman(x, np.array([5.0, 5.0, 1.0, 0.0])) == pytest.approx(-0.9486832980505138)

    @pytest.mark.parametrize(
        ("x", "y", "reason"),
        [
            ([1, 2], [1, 2], "at least 3 points"),
            ([1, 1, 1], [1, 2, 3], "same value"),
            ([1, 2, 3], [7, 7, 7], "same value"),
        ],
    )
    def test_without_variance_or_points_it_is_undefined(self, x, y, reason):
        x, y = np.array(x, dtype=float), np.array(y, dtype=float)
        for found in (pearson(x, y, 10, [0]), spearman(x, y)):
            assert isinstance(found, Undefined)
            assert reason in found.reason

    def test_draws_in_which_one_side_is_constant_have_no_value(self):
        found = pearson(np.array([0.0, 0.0, 1.0]), np.array([0.0, 1.0, 2.0]), 500, [0])
        assert np.isnan(found.draws).any()
        assert found.value == pytest.approx(0.8660254037844386)


def test_from_three_pairs_on_headlines_are_correlated_on_their_own():
    found = pd.DataFrame([(pair, name) for pair in "abc" for name in ("r8", "r1")], columns=["pair", "system"])
    results = SimpleNamespace(headlines={"a": "r8", "b": "r1", "c": "r8"})
    scopes = _scopes(results, found)
    assert list(scopes) == ["all pairs", "headlines of all pairs", "a", "b", "c"]
    assert scopes["headlines of all pairs"].to_numpy().tolist() == [["a", "r8"], ["b", "r1"], ["c", "r8"]]
    assert "headlines of all pairs" not in _scopes(results, found[found["pair"] != "c"])
