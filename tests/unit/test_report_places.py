"""Where tables and figures stand in a report: in the paper's order, and nothing of ours among them."""

from test_report_captions import NAMES

from kvferry.report.places import BEYOND, FIGURES, PROVENANCE, SUMMARY, TABLES, category, labels


def names_in(place):
    """Names in the order in which a report that sorts by words shows them."""
    return sorted((name for name in NAMES if category(name) == place), key=lambda name: list(labels(name).values()))


def test_the_papers_figures_and_tables_are_in_its_order():
    assert [labels(name)["number"] for name in names_in(FIGURES)] == [f"Figure {n:02d}" for n in range(1, 10)]
    assert [labels(name)["number"] for name in names_in(TABLES)] == [f"Table {n:02d}" for n in range(1, 19)]


def test_what_is_ours_is_apart():
    assert names_in(BEYOND)[:2] == ["fig10_correlation", "fig11_native_tokens"]
    assert {"improved", "controls", "gap_recovered"} < set(names_in(BEYOND))
    assert names_in(SUMMARY) == ["reproduction", "verdict"]
    assert names_in(PROVENANCE) == ["provenance"]


def test_a_pair_and_a_subject_are_named():
    assert labels("fig2_r2_heatmap", "a-to-b") == {"number": "Figure 02", "subject": "r2 heatmap", "pair": "a-to-b"}
    assert len({tuple(labels(name).values()) for name in NAMES}) == len(NAMES)
