"""Figures 1 and 3 hold the facts of the run, in boxes that the text fits into; table 6 is the paper's, and our best recipe's."""

from dataclasses import replace

import pandas as pd
import pytest
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Annotation
from test_report_inputs import CONFIG, PAIRS, build, manifest
from test_report_sweeps import build_swept
from test_report_sweeps import load as load_swept

from kvferry.errors import KvferryError
from kvferry.report import style
from kvferry.report.figures.boxes import MARGIN, WIDTH, Box, draw_boxes, place
from kvferry.report.figures.schematics import fig1_pipeline, fig3_mapper
from kvferry.report.inputs import Results
from kvferry.report.tables import write_table
from kvferry.report.tables.methods import OURS, table6_methods
from kvferry.report.tables.render import readable

PAIR, HEADLINE = "small-to-big", "ridge_k8"
BOTH = (fig1_pipeline, fig3_mapper)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results.load(build(tmp_path_factory.mktemp("results")), CONFIG, PAIRS)


def mapped(results, k=8, **changes):
    """The results with another headline mapper."""
    own = {**manifest(k, **changes), "selected_layers": [list(range(9, 9 + k))] * 30}
    return replace(results, manifests={**results.manifests, (PAIR, HEADLINE): own})


def labels(figure, results, tmp_path):
    """Text by box, as the csv has it."""
    figure(results, tmp_path / "figure")
    return pd.read_csv(tmp_path / "figure.csv").set_index("box")["label"].to_dict()


@pytest.mark.parametrize("figure", BOTH)
def test_files_are_written_and_equal_on_two_runs(figure, results, tmp_path):
    for run in ("one", "two"):
        figure(results, tmp_path / run / "f")
    for kind in ("pdf", "png", "csv"):
        assert (tmp_path / f"one/f.{kind}").read_bytes() == (tmp_path / f"two/f.{kind}").read_bytes()


def test_the_pipeline_says_models_shapes_and_size(results, tmp_path):
    said = labels(fig1_pipeline, results, tmp_path)
    assert said["source prefill"] == "source prefill: | small | 24 layers"
    assert said["re-prefill"] == "plain re-prefill: | big | 30 layers"
    assert said["source cache"].endswith("24 layers × 3 KV heads × 64")
    assert "reads 8 of 24 source layers" in said["mapper"]
    assert "24,000 parameters (16.0 % of target)" in said["mapper"]
    assert said["decode"] == "decoding by the target: big"


def test_tokens_that_the_target_reads_itself_are_said(results, tmp_path):
    key = (PAIR, HEADLINE, "prefix_perplexity")
    held = replace(results.transfers[key], settings={"hold_back": 2})
    own = replace(mapped(results, native_head=4), transfers={**results.transfers, key: held})
    said = labels(fig1_pipeline, own, tmp_path)
    assert said["decode"].endswith("it reads the last 2 prompt tokens itself")
    assert said["mapped cache"].endswith("first 4 tokens by the target itself")


def test_the_mapper_says_layers_heads_formula_and_rope(results, tmp_path):
    said = labels(fig3_mapper, mapped(results), tmp_path)
    assert [name for name in said if "layer" in name] == ["layer 9", "layer 10", "more layers", "layer 16"]
    assert said["more layers"] == "5 more | layers"
    assert "source RoPE stripped" in said["features"]
    assert "all 3 KV heads of k = 8 layers, 64 each" in said["features"]
    assert "1,536 features" in said["features"]
    assert "32,768 calibration rows" in said["centre"]
    assert said["map"].startswith("W = (XᵀX + nλI)⁻¹ XᵀY | λ = 0.01")
    assert said["keys"] == "keys: | target RoPE put on"
    assert said["target cache"].endswith("layer 15, each of its 3 KV heads")


@pytest.mark.parametrize("k", [1, 3, 4, 5])
def test_another_k_changes_both_figures(k, results, tmp_path):
    own = mapped(results, k)
    said = labels(fig3_mapper, own, tmp_path)
    shown = [name for name in said if name.startswith("layer ")]
    assert shown == ([f"layer {9 + i}" for i in range(k)] if k < 5 else ["layer 9", "layer 10", "layer 13"])
    assert f"k = {k} layer" in said["features"]
    assert f"{192 * k:,} × 64" in said["map"]
    assert f"reads {k} of 24" in labels(fig1_pipeline, own, tmp_path)["mapper"]


@pytest.mark.parametrize(
    ("changes", "box", "words"),
    [
        ({"rope": "coupled"}, "features", "keys with the source's RoPE"),
        ({"rope": "coupled"}, "keys", "as they are mapped"),
        ({"rope": "not_reapplied"}, "features", "source RoPE stripped"),
        ({"rope": "not_reapplied"}, "keys", "as they are mapped"),
        ({"support": "same_head"}, "features", "the same KV head of k = 8"),
        ({"lambda": 0.0}, "map", "W = (XᵀX)⁻¹ XᵀY | 1,536"),
        ({"method": "ols", "lambda": 0.0}, "map", "W = (XᵀX)⁻¹ XᵀY | 1,536"),
        ({"lambda_scale": "sum"}, "map", "(XᵀX + λI)⁻¹"),
        ({"lambda_scale": "trace"}, "map", "(XᵀX + τλI)⁻¹"),
        ({"row_weights": "sink"}, "map", "W = (XᵀRX + nλI)⁻¹ XᵀRY"),
        ({"row_weights": "sink"}, "map", "R: weights of rows (sink); λ = 0.01; n: their sum"),
        ({"row_weights": "sink", "lambda": 0.0}, "map", "R: weights of rows (sink) | 1,536"),
        ({"method": "mlp", "mlp": {"width": 32, "epochs": 3}}, "map", "1,536 → 32 → 32 → 64"),
    ],
)
def test_another_recipe_is_drawn_as_what_it_is(changes, box, words, results, tmp_path):
    assert words in labels(fig3_mapper, mapped(results, **changes), tmp_path)[box]


@pytest.mark.parametrize("figure", BOTH)
def test_texts_fit_their_boxes_and_boxes_stand_apart(figure, results, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(style, "save", lambda drawn, *_: kept.append(drawn))
    long = replace(
        results.pairs[0], source="a-model-of-a-family-with-a-long-name-24l", target="its-larger-sibling-of-many-words"
    )
    cards = {long.source: results.cards["small"], long.target: results.cards["big"]}
    figure(replace(mapped(results, row_weights="attention", lambda_scale="trace"), pairs=[long], cards=cards), tmp_path)
    (ax,) = kept[0].axes
    boxes = [patch.get_window_extent() for patch in ax.patches if isinstance(patch, FancyBboxPatch)]
    texts = [text for text in ax.texts if not isinstance(text, Annotation)]
    assert len(texts) == len(boxes) > 7
    for text, box in zip(texts, boxes, strict=True):
        own = text.get_window_extent()
        assert box.x0 < own.x0 < own.x1 < box.x1
        assert box.y0 < own.y0 < own.y1 < box.y1
        assert text.get_fontsize() >= 4.5
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(arrow.xy[1] < arrow.xyann[1] for arrow in ax.texts if isinstance(arrow, Annotation))


def test_places_share_the_width_and_an_empty_one_stays_empty():
    tall, low = Box("tall", "plain", ("1", "2", "3")), Box("low", "plain", ("1",))
    placed = place([[tall, None], [low]], (3, 1))
    assert list(placed) == ["tall", "low"]
    assert placed["low"].right - placed["low"].left == pytest.approx(WIDTH)
    assert 0.5 < (placed["tall"].right - placed["tall"].left) / WIDTH < 0.75
    assert placed["tall"].bottom > placed["low"].top > placed["low"].bottom == MARGIN
    assert placed["tall"].top - placed["tall"].bottom > placed["low"].top - placed["low"].bottom


@pytest.mark.parametrize(("leads_to", "message"), [("c", "'c', which is no box"), ("a", "'a' is not below it")])
def test_an_arrow_that_cannot_be_drawn_is_refused(leads_to, message, tmp_path):
    rows = [[Box("a", "plain", ("a",))], [Box("b", "plain", ("b",), (leads_to,))]]
    with pytest.raises(KvferryError, match=message):
        draw_boxes(rows, "title", tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_table_6_is_the_papers_without_a_sweep_of_recipes(results, tmp_path):
    frame = table6_methods(results)
    assert len(frame) == 5
    assert frame.set_index("method").loc["the paper's"].tolist() == ["yes"] * 4
    assert frame.set_index("method").loc["C2C"].tolist() == ["no", "yes", "yes", "no"]
    shown, notes = readable(frame)
    assert list(shown.columns) == ["method", "gradient-free", "cross-scale", "moves KV values", "closed form"]
    assert not notes
    write_table(frame, tmp_path / "table6_methods")
    assert "| the paper's | yes | yes | yes | yes |" in (tmp_path / "table6_methods.md").read_text()


def test_table_6_ends_with_the_best_recipe_where_one_was_chosen(tmp_path):
    swept = load_swept(build_swept(tmp_path))
    last = table6_methods(swept).iloc[-1].tolist()
    assert last == [f"{OURS} (head4, {PAIR})", "yes", "yes", "yes", "yes"]
    cards = {**swept.cards, "small": swept.cards["big"]}
    assert table6_methods(replace(swept, cards=cards)).iloc[-1]["cross_scale"] == "no"
