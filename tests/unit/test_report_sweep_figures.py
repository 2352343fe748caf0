"""Figures of sweeps and of the greedy selection: the csv is what is drawn, and files are the same on every run."""

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from test_report_sweeps import FULL, PAIR, SWEPT_CONFIG, build_swept, load, sweep

from kvferry.errors import KvferryError
from kvferry.report import style
from kvferry.report.figures import FIGURES, fig5_greedy_r2
from kvferry.report.figures.layers import dashes, tick_numbers
from kvferry.report.inputs import read_greedy
from kvferry.report.style import OKABE_ITO

COLUMNS = ["kind", "target_layer", "head", "step", "source_layer", "r2", "r2_all", "n", "p_all"]


@pytest.fixture
def saved(monkeypatch):
    """Figures as they are when they are saved."""
    figures, save = [], style.save
    monkeypatch.setattr(style, "save", lambda figure, *rest: (figures.append(figure), save(figure, *rest)))
    return figures


@pytest.fixture
def greedy():
    keys = itertools.product(("k_stripped", "v"), (0, 7, 29), range(3), range(1, 5))
    rows = [
        (kind, layer, head, step, step, 0.2 * step + 0.01 * head, 0.95, 4096, 1536) for kind, layer, head, step in keys
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def files(stem):
    return [stem.with_name(f"{stem.name}.{kind}").read_bytes() for kind in ("pdf", "png", "csv")]


def panel(figure, start):
    (found,) = (ax for ax in figure.axes if ax.get_title().startswith(start))
    return found


def test_files_of_all_figures_are_equal_on_two_runs(tmp_path, greedy):
    for run in ("one", "two"):
        results = load(build_swept(tmp_path / "results"))
        for name in ("fig6_accuracy_vs_k", "fig7_component_removal"):
            FIGURES[name](results, tmp_path / run / name)
        fig5_greedy_r2({PAIR: greedy.sample(frac=1, random_state=1)}, tmp_path / run / "fig5")
    for name in ("fig6_accuracy_vs_k", "fig7_component_removal", "fig5"):
        assert files(tmp_path / "one" / name) == files(tmp_path / "two" / name)


def test_curves_are_the_csv_on_the_items_of_the_sweep(tmp_path, saved):
    FIGURES["fig6_accuracy_vs_k"](load(build_swept(tmp_path)), tmp_path / "fig6")
    drawn = pd.read_csv(tmp_path / "fig6.csv")
    assert drawn["k"].tolist()[:-1] == [1, 2, 8, FULL]
    assert drawn["hellaswag"].tolist() == pytest.approx([50, 65, 75, 75, 90])
    ax = panel(saved[0], "HellaSwag (n = 20)")
    (curve,) = (
        line for line in ax.lines if line.get_marker() == style.of_pair(0)["marker"] and len(line.get_xdata()) == 4
    )
    assert curve.get_ydata() == pytest.approx(drawn["hellaswag"].tolist()[:-1])
    (target,) = (line for line in ax.lines if line.get_ydata()[0] == pytest.approx(90))
    assert target.is_dashed()
    (ring,) = (line for line in ax.lines if line.get_fillstyle() == "none")
    assert ring.get_xdata().tolist() == [FULL]
    (band,) = (part for part in ax.collections if isinstance(part, PolyCollection))
    heights = band.get_paths()[0].vertices[:, 1]
    ends = drawn[["hellaswag_low", "hellaswag_high"]].iloc[:-1].to_numpy()
    assert (heights.min(), heights.max()) == pytest.approx((ends.min(), ends.max()))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "8", "24"]


def test_kl_has_a_panel_even_where_no_benchmark_has(tmp_path, saved):
    config = SWEPT_CONFIG | {"sweeps": {"k": sweep("k2", "ridge_k8", "all")}}
    FIGURES["fig6_accuracy_vs_k"](load(build_swept(tmp_path), config), tmp_path / "fig6")
    (ax,) = saved[0].axes
    assert ax.get_title() == "next-token KL (n = 24)"
    assert "nats per token" in ax.get_ylabel()
    assert not any(line.is_dashed() for line in ax.lines)
    assert [text.get_text() for text in saved[0].legends[0].get_texts()] == [PAIR, "all source layers"]


@pytest.mark.parametrize(("figure", "name"), [("fig6_accuracy_vs_k", "k"), ("fig7_component_removal", "components")])
def test_a_figure_of_a_sweep_without_variants_is_refused(tmp_path, figure, name):
    config = SWEPT_CONFIG | {"sweeps": SWEPT_CONFIG["sweeps"] | {name: sweep(hellaswag=20)}}
    with pytest.raises(KvferryError, match=rf"sweeps\.{name}: names no variants"):
        FIGURES[figure](load(build_swept(tmp_path), config), tmp_path / figure)
    assert not list(tmp_path.glob(f"{figure}.*"))


def test_crowded_numbers_leave_room():
    numbers = tick_numbers(list(range(1, FULL + 1)))
    assert numbers[-3:] == ["", "", "24"]
    shown = [int(number) for number in numbers if number]
    assert all(np.sqrt(later) - np.sqrt(k) >= 0.06 * (np.sqrt(24) - 1) for k, later in itertools.pairwise(shown))
    assert tick_numbers([1, 2, 4, 8, 16, 24, 30]) == ["1", "2", "4", "8", "16", "24", "30"]
    assert tick_numbers([8]) == ["8"]


def test_dashes_of_two_pairs_with_one_target_do_not_overlap(tmp_path):
    results = load(build_swept(tmp_path))
    pair = results.pairs[0]
    others = [replace(pair, name="again"), replace(pair, name="elsewhere", target="huge")]
    three = replace(results, pairs=[pair, *others])
    (first, (dash, gap)), (second, _), alone = (dashes(three, each) for each in three.pairs)
    assert dash == gap == second - first
    assert alone == dashes(results, pair)


def test_components_are_bars_with_ceiling_and_source(tmp_path, saved):
    FIGURES["fig7_component_removal"](load(build_swept(tmp_path)), tmp_path / "fig7")
    drawn = pd.read_csv(tmp_path / "fig7.csv")
    ax = panel(saved[0], "HellaSwag (n = 20)")
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([75, 25, 10])
    assert [label.get_text() for label in ax.get_yticklabels()] == drawn["configuration"].tolist()[:3]
    lines = {line.get_color(): line.get_xdata()[0] for line in ax.lines if len(set(line.get_xdata())) == 1}
    assert lines[OKABE_ITO["black"]] == 90
    assert lines[OKABE_ITO["orange"]] == 60
    assert ax.yaxis_inverted()
    assert [ax.get_xlabel() for ax in saved[0].axes] == ["accuracy, %", "perplexity (log axis)", "nats per token"]
    ppl = panel(saved[0], "prefix perplexity (n = 24)")
    assert (ppl.get_xscale(), len(ppl.patches)) == ("log", 0)
    kl = panel(saved[0], "next-token KL (n = 24)")
    assert [bar.get_width() for bar in kl.patches] == pytest.approx([0.2, 1.5, 2.5])
    legend = [text.get_text() for text in saved[0].legends[0].get_texts()]
    assert legend == ["transfer", "target's own cache (ceiling)", "source alone"]


def test_greedy_curves_are_means_over_heads(tmp_path, greedy, saved):
    fig5_greedy_r2({"a": greedy, "b": greedy[greedy["target_layer"] < 20]}, tmp_path / "fig5")
    drawn = pd.read_csv(tmp_path / "fig5.csv")
    one = drawn[(drawn["pair"] == "a") & (drawn["kind"] == "v") & (drawn["target_layer"] == 7)]
    assert one["r2"].tolist() == pytest.approx([0.21, 0.41, 0.61, 0.81])
    assert set(one["heads"]) == {3}
    panels = saved[0].axes[:4]
    assert [len([line for line in ax.lines if line.get_marker() == "D"]) for ax in panels] == [3, 2, 3, 2]
    assert "n = 4,096 rows, p of all = 1,536" in panels[0].get_title()
    assert "K, RoPE stripped" in panels[0].get_ylabel()
    assert [label.get_text() for label in panels[2].get_xticklabels()] == ["4", "3", "2", "1", "all"]
    diamond = next(line for line in panels[0].lines if line.get_marker() == "D")
    assert diamond.get_ydata() == pytest.approx([0.95])
    assert panels[0].lines[0].get_color() == panels[1].lines[0].get_color()


def test_early_and_late_layers_differ_in_lightness(tmp_path, greedy, saved):
    fig5_greedy_r2({"a": greedy}, tmp_path / "fig5")
    colours = [np.mean(line.get_color()[:3]) for line in saved[0].axes[0].lines if line.get_marker() == "D"]
    assert colours == sorted(colours)
    assert colours[-1] - colours[0] > 0.1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frame: frame[frame["kind"] != "v"],
        lambda frame: frame.drop(index=5),
        lambda frame: pd.concat([frame, frame.head(1)]),
        lambda frame: pd.concat([frame.drop(index=0), frame.tail(1)]),
    ],
)
def test_an_incomplete_selection_is_refused(tmp_path, greedy, spoil):
    with pytest.raises(KvferryError, match=r"greedy selection of a: .* not complete or repeat"):
        fig5_greedy_r2({"a": spoil(greedy)}, tmp_path / "fig5")
    with pytest.raises(KvferryError, match=r"greedy\.pairs"):
        fig5_greedy_r2({}, tmp_path / "fig5")
    assert not list(tmp_path.iterdir())


def test_a_selection_without_a_column_is_refused(tmp_path, greedy):
    greedy.drop(columns="r2_all").to_csv(tmp_path / "greedy.csv", index=False)
    with pytest.raises(KvferryError, match=r"greedy\.csv: the greedy selection lacks the columns r2_all"):
        read_greedy(tmp_path / "greedy.csv")
    greedy.to_csv(tmp_path / "greedy.csv", index=False)
    pd.testing.assert_frame_equal(read_greedy(tmp_path / "greedy.csv"), greedy)
