"""Figures: the csv is what is drawn, files are the same on every run, and incomplete input is refused."""

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib import color_sequences
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from test_report_inputs import CONFIG, PAIRS, accuracy_items, build, only, write_native

from kvferry.errors import KvferryError
from kvferry.report import style
from kvferry.report.figures import FIGURES, fig2_r2_heatmap
from kvferry.report.inputs import Results
from kvferry.report.names import KINDS


@pytest.fixture
def probe():
    layers = list(itertools.product(KINDS, range(4), range(6)))
    frame = pd.DataFrame(layers, columns=["kind", "source_layer", "target_layer"])
    return frame.assign(r2=np.linspace(0.1, 0.9, len(frame)), n=32768, p=64)


@pytest.fixture
def saved(monkeypatch):
    """Figures as they are when they are saved."""
    figures, save = [], style.save
    monkeypatch.setattr(style, "save", lambda figure, *rest: (figures.append(figure), save(figure, *rest)))
    return figures


def files(stem):
    return [stem.with_name(f"{stem.name}.{kind}").read_bytes() for kind in ("pdf", "png", "csv")]


def test_heat_map_draws_its_csv_with_source_layers_down(tmp_path, probe, saved):
    shuffled = probe.sample(frac=1, random_state=0)
    fig2_r2_heatmap(shuffled, "a-to-b", tmp_path / "fig2")
    drawn = pd.read_csv(tmp_path / "fig2.csv")
    panels = saved[0].axes[:3]
    for ax, kind in zip(panels, KINDS, strict=True):
        rows = drawn[drawn["kind"] == kind].set_index(["source_layer", "target_layer"])["r2"]
        image = ax.get_images()[0]
        assert image.get_array().shape == (4, 6)
        assert image.get_array()[3, 1] == rows[3, 1]
        assert ax.get_title() == KINDS[kind]
        assert image.get_clim() == (0, 1)
    assert panels[0].yaxis_inverted()
    assert "32,768 rows" in saved[0].get_suptitle()
    assert "64 features" in saved[0].get_suptitle()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda frame: frame[frame["kind"] != "v"], "kind v is missing"),
        (lambda frame: frame.drop(index=3), "kind k_rope lacks some"),
        (lambda frame: pd.concat([frame, frame.head(1)]), "repeats"),
    ],
)
def test_an_incomplete_probe_is_refused(tmp_path, probe, spoil, message):
    with pytest.raises(KvferryError, match=message):
        fig2_r2_heatmap(spoil(probe), "a-to-b", tmp_path / "fig2")
    assert not list(tmp_path.iterdir())


def test_bars_are_the_csv(tmp_path, saved):
    results = Results.load(build(tmp_path), CONFIG, PAIRS)
    FIGURES["fig8_retention"](results, tmp_path / "fig8")
    drawn = pd.read_csv(tmp_path / "fig8.csv")
    assert drawn["system"].tolist() == ["source alone", "transfer"] * 3
    heights = [bar.get_height() for ax in saved[0].axes for bar in ax.patches]
    assert heights == pytest.approx(drawn["retention"].tolist())
    assert heights[1] == pytest.approx(100 * 75 / 90)
    ends = [path.vertices[:, 1] for ax in saved[0].axes for bars in ax.collections for path in bars.get_paths()]
    assert np.array(ends) == pytest.approx(drawn[["retention_low", "retention_high"]].to_numpy())
    assert all("n = 100" in ax.get_title() for ax in saved[0].axes)


def test_an_undefined_bar_is_a_word_in_figure_and_csv(tmp_path, saved):
    write_native(build(tmp_path), "big", "mmlu", accuracy_items(0))
    FIGURES["fig8_retention"](Results.load(tmp_path, CONFIG, PAIRS), tmp_path / "fig8")
    drawn = pd.read_csv(tmp_path / "fig8.csv")
    assert drawn.loc[drawn["benchmark"] == "mmlu", "retention"].tolist() == ["undefined"] * 2
    mmlu = saved[0].axes[2]
    assert [text.get_text() for text in mmlu.texts] == ["undefined"] * 2
    assert not mmlu.patches


def test_a_panel_that_is_higher_than_the_first_is_not_cut(tmp_path, saved):
    write_native(build(tmp_path), "small", "mmlu", accuracy_items(99))
    FIGURES["fig8_retention"](Results.load(tmp_path, CONFIG, PAIRS), tmp_path / "fig8")
    highest = pd.read_csv(tmp_path / "fig8.csv")["retention_high"].max()
    assert all(ax.get_ylim()[0] == 0 and ax.get_ylim()[1] > highest > 105 for ax in saved[0].axes)


def test_a_figure_without_any_bar_still_has_its_legend(tmp_path, saved):
    build(tmp_path)
    for name in ("arc_challenge", "hellaswag", "mmlu"):
        write_native(tmp_path, "big", name, accuracy_items(0))
    FIGURES["fig8_retention"](Results.load(tmp_path, CONFIG, PAIRS), tmp_path / "fig8")
    texts = [text.get_text() for text in saved[0].legends[0].get_texts()]
    assert texts == ["source alone", "transfer", "target = 100 %"]


@pytest.mark.parametrize(("width", "columns"), [(8, 3), (3, 2), (1, 1)])
def test_a_legend_has_as_many_columns_as_the_figure_has_room_for(width, columns):
    with style.house_style():
        figure = Figure(figsize=(width, 3), layout="constrained")
        handles = [Line2D([], [], label=label) for label in ("source alone", "transfer", "target = 100 %")]
        legend = style.legend_below(figure, handles, 3)
        figure.draw_without_rendering()
        assert legend._ncols == columns
        assert figure.legends == [legend]
        assert columns == 1 or legend.get_window_extent().width <= figure.bbox.width


def test_files_are_equal_on_two_runs(tmp_path, probe, monkeypatch):
    results = Results.load(build(tmp_path), CONFIG, PAIRS)
    for run, colour in (("one", "red"), ("two", "blue")):
        monkeypatch.setitem(style.mpl.rcParams, "axes.edgecolor", colour)  # a user's own style must not show
        FIGURES["fig8_retention"](results, tmp_path / run / "fig8")
        fig2_r2_heatmap(probe, "a-to-b", tmp_path / run / "fig2")
    for name in ("fig8", "fig2"):
        assert files(tmp_path / "one" / name) == files(tmp_path / "two" / name)


def test_pdf_keeps_text_as_truetype_and_no_date(tmp_path):
    with style.house_style():
        figure = Figure()
        figure.suptitle("text")
        style.save(figure, pd.DataFrame({"x": [1]}), tmp_path / "f")
    pdf = (tmp_path / "f.pdf").read_bytes()
    assert b"/Type3" not in pdf.replace(b" ", b"")
    assert b"CreationDate" not in pdf


def test_figure_8_without_its_benchmarks_is_refused(tmp_path):
    with pytest.raises(KvferryError, match="fig8_retention: needs one of"):
        FIGURES["fig8_retention"](Results.load(build(tmp_path), only("gsm8k"), PAIRS), tmp_path / "fig8")


def test_no_two_systems_look_alike():
    for name in ("color", "marker", "linestyle"):
        values = [look[name] for look in style.SYSTEMS.values()]
        assert len(set(values)) == len(values)


def test_colours_are_those_of_okabe_and_ito():
    known = {to_hex(colour) for colour in color_sequences["okabe_ito"]}
    assert {colour.lower() for colour in style.OKABE_ITO.values()} == known
