"""What README.md and docs/ name is there: files, links, keys of example configs; and the scripts that make parts of them."""

import re

import pytest
from pages import PAGES, ROOT, blocks, script
from PIL import Image

from kvferry.config import load_project
from kvferry.errors import KvferryError
from kvferry.reference import anchor
from kvferry.schema import validated
from kvferry.yamlfile import read_yaml

SCHEMAS = ROOT / "workflow/schemas"
REGISTRIES = ("models", "pairs", "corpora", "wheels")
# A path of the repository in the text; of the package's modules the pages leave `src/kvferry/` out.
NAMED = re.compile(r"`((?:src|docs|tests|config|workflow|profiles|envs|resources/paper|bench)/[\w./-]*\w/?)`")
MODULE = re.compile(r"`((?:prepare|kv|fit|evaluate|report)/\w+\.py)`")
LINK = re.compile(r"\]\(([^)\s]*)\)")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "decisions.md"], ids=lambda page: page.name)
def test_every_file_that_is_named_is_there(page):
    text = page.read_text(encoding="utf-8")
    named = [*NAMED.findall(text), *(f"src/kvferry/{module}" for module in MODULE.findall(text))]
    assert not [path for path in named if not (ROOT / path).exists()]


def headings(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    return {anchor(line.lstrip("#").strip()) for line in lines if line.startswith("#")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        place, _, part = link.partition("#")
        if place.startswith("http"):
            continue
        linked = page.parent / place if place else page
        assert linked.exists(), link
        assert not part or part in headings(linked), link


def merged(base, change):
    """Nested mappings, of which those of `change` win."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return base | {key: merged(base.get(key), value) for key, value in change.items()}


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_an_example_in_yaml_is_taken(page, text, tmp_path):
    file = tmp_path / f"{page}.yaml"
    file.write_text(text)
    example = read_yaml(file)
    kind = next(iter(example))
    if len(example) == 1 and kind in REGISTRIES:
        assert validated(example, SCHEMAS / f"{kind}.schema.yaml", page)
    else:
        whole = example if "headline" in example else merged(read_yaml(ROOT / "config/ci.yaml"), example)
        load_project(whole, page, SCHEMAS, ROOT)


def test_pictures_are_there_and_small():
    pictures = script("pictures")
    for name in pictures.FIGURES:
        path = pictures.PICTURES / f"{name}.png"
        assert path.stat().st_size <= pictures.MOST_BYTES
        assert Image.open(path).format == "PNG"


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """The script, with a place of its own for what it writes."""
    found = script("pictures")
    monkeypatch.setattr(found, "PICTURES", tmp_path / "pictures")
    return found


def drawn(folder, names, noisy=False):
    folder.mkdir()
    for name in names:
        picture = Image.effect_noise((2400, 1600), 80) if noisy else Image.new("RGB", (2400, 1600), "white")
        picture.save(folder / f"{name}.png")
    return folder


def test_pictures_are_made_of_figures_and_fit(pictures, tmp_path):
    pictures.pictures(drawn(tmp_path / "figures", pictures.FIGURES))
    made = sorted(pictures.PICTURES.iterdir())
    assert [path.stem for path in made] == sorted(pictures.FIGURES)
    assert all(max(Image.open(path).size) == pictures.SIZES[0][0] for path in made)


@pytest.mark.parametrize(
    ("missing", "noisy", "words"), [(1, False, r"lacks fig2_r2_heatmap.*`make demo`"), (0, True, r"60,000 are allowed")]
)
def test_nothing_is_written_where_a_figure_is_missing_or_too_rich(pictures, tmp_path, missing, noisy, words):
    figures = drawn(tmp_path / "figures", pictures.FIGURES[missing:], noisy)
    with pytest.raises(KvferryError, match=words):
        pictures.pictures(figures)
    assert not pictures.PICTURES.exists()


def test_a_file_that_is_no_picture_is_named(pictures, tmp_path):
    figures = drawn(tmp_path / "figures", pictures.FIGURES)
    (figures / f"{pictures.FIGURES[0]}.png").write_text("no picture")
    with pytest.raises(KvferryError, match=rf"{pictures.FIGURES[0]}.png: not a picture"):
        pictures.pictures(figures)


GRAPH = """
id0[all]
id1[fit_a_1]
id2[fit_b_1]
id3[fit_extra]
id4[dump]
id1 --> id0
id2 --> id0
id4 --> id1
id4 --> id0
id4 --> id3
"""


def test_rules_of_one_kind_are_drawn_once_and_implied_arrows_left_out():
    dag = script("dag")
    needs = dag.needs(GRAPH, ["fit", "fit_extra", "dump"])
    assert needs == {"all": {"fit", "dump"}, "fit": {"dump"}, "fit_extra": {"dump"}, "dump": set()}
    assert dag.reduced(needs) == {"all": {"fit"}, "fit": {"dump"}, "fit_extra": {"dump"}, "dump": set()}


def test_a_page_without_a_place_for_the_picture_is_refused():
    dag = script("dag")
    assert dag.drawn_into(f"a\n{dag.BEGIN}old\n{dag.END}\nb", "new\n") == f"a\nnew\n{dag.END}\nb"
    with pytest.raises(KvferryError, match="lacks the lines"):
        dag.drawn_into("a page", "new\n")
