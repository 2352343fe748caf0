"""Every table and figure that a config can give has a caption, whose place-holders the shipped config fills."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from jinja2 import Environment, StrictUndefined

from kvferry.config import load_project, read_yaml
from kvferry.report.verdict import NOT_DECIDED, TIERS
from kvferry.report.wanted import BARS, FIVE, HELD_OUT, SECTIONS, TABLES, figures_of, tables_of

ROOT = Path(__file__).parents[2]
CAPTIONS = ROOT / "workflow/report"
CONFIG = ROOT / "config/config.yaml"
SWEEPS = {name for needed in TABLES.values() for name in needed} - set(SECTIONS) - set(HELD_OUT) - set(FIVE)
EVERYTHING = {
    "pairs": ["one"],
    "sweeps": {name: {"benchmarks": {"hellaswag": {}}} for name in SWEEPS},
    "evaluation": {"benchmarks": {name: {} for name in (*BARS, *HELD_OUT)}},
    "greedy": {"pairs": ["one"]},
    **{name: {} for name in SECTIONS},
}
NAMES = [*tables_of(EVERYTHING), *(name.removesuffix("_one") for name in figures_of(EVERYTHING))]
PLACE = re.compile(r"\{\{(.*?)\}\}")
KEYS = re.compile(r'snakemake\.config((?:\["\w+"\])+)')


@pytest.fixture(scope="module")
def config():
    return load_project(read_yaml(CONFIG), CONFIG, ROOT / "workflow/schemas").config


def test_everything_wants_every_table_and_figure():
    assert set(NAMES) >= {*TABLES, "fig1_pipeline", "fig2_r2_heatmap", "fig11_native_tokens"}
    assert len(set(NAMES)) == len(NAMES)


def test_each_has_a_caption_and_there_is_none_besides_but_that_of_the_report():
    assert sorted(path.stem for path in CAPTIONS.glob("*.rst")) == sorted([*NAMES, "workflow"])


@pytest.mark.parametrize("name", NAMES)
def test_a_caption_says_something_and_where_the_paper_stands(name, config):
    text = (CAPTIONS / f"{name}.rst").read_text(encoding="utf-8")
    assert len(text) > 300
    assert "paper" in text
    assert text.endswith(".\n")
    for place in PLACE.findall(text):
        found = KEYS.fullmatch(place.strip())
        assert found, f"{place} is no place-holder"
        value = config
        for key in re.findall(r'"(\w+)"', found[1]):
            value = value[key]
        assert isinstance(value, int | float), f"{place} is no number"


# Made from geometries, or from the paper alone.
NOT_DRAWN = ("table6_methods", "table10_pairs", "fig1_pipeline")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_DRAWN])
def test_a_caption_says_what_was_drawn_by_which_seed(name):
    assert "seed" in (CAPTIONS / f"{name}.rst").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_caption_says_what_n_is_or_that_nothing_is_sampled(name):
    text = " ".join((CAPTIONS / f"{name}.rst").read_text(encoding="utf-8").split())
    words = (r"\bn\b", "nothing to sample", "nothing is sampled", "number of rows n", "No intervals", "trials")
    assert any(re.search(word, text) for word in words)


def test_the_text_of_the_report_is_filled_by_every_config():
    template = Environment(undefined=StrictUndefined).from_string(
        (CAPTIONS / "workflow.rst").read_text(encoding="utf-8")
    )
    for name in ("config", "ci", "small", "paper"):
        file = ROOT / f"config/{name}.yaml"
        filled = load_project(read_yaml(file), file, ROOT / "workflow/schemas").config
        text = template.render(snakemake=SimpleNamespace(config=filled))
        assert filled["pairs"][0] in text
        assert ("every item, as in the paper" in text) == filled["evaluation"]["full"]


def test_the_caption_of_the_verdict_has_the_bounds_that_are_judged_by():
    text = " ".join((CAPTIONS / "verdict.rst").read_text(encoding="utf-8").split())
    best, part, _ = TIERS
    for words in (
        *(f'"{tier.name}"' for tier in TIERS),
        f'"{NOT_DECIDED}"',
        f"from {100 * best.retention:.0f} % retention and an attention-output cosine of {best.cosine:.2f} on",
        f"from {100 * part.retention:.0f} % and {part.cosine:.2f} on",
    ):
        assert words in text
