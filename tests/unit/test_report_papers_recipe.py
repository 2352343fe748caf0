"""The paper's number stands beside a mapper of the paper's shape alone, in every table that has the paper's numbers."""

import json

import pytest
from test_report_inputs import PAPER_PAIRS, recipe, write_json
from test_report_sweeps import PAIR, PAPERS_MLP, SWEPT_CONFIG, build_swept, load

from kvferry.report.papers_recipe import LINEAR, NETWORK, ROPES, is_papers, method_of
from kvferry.report.tables import TABLES

OTHER_SHAPES = [
    {"support": "same_head"},
    {"row_weights": "sink"},
    {"row_weights": "attention"},
    {"native_head": 4, "head_rows": "kept"},
    {"rope": "not_reapplied", "native_head": 1},
]
WITH_PAPER = [
    "table1_retention",
    "table2_ablation",
    "table3_mlp",
    "table7_r2_vs_k",
    "table8_calibration",
    "table9_domain",
]
WITH_PAPER += ["table12_size", "table13_accuracy", "table15_floor_normalised", "table17_loo_k"]


def change(root, *names, **changes):
    """Give the mappers of these names another recipe, and leave all else as it is."""
    for name in names:
        path = root / f"pairs/{PAIR}/mappers/{name}/manifest.json"
        manifest = json.loads(path.read_text())
        write_json(path, manifest | {"recipe": manifest["recipe"] | changes})


def papers(root, table):
    """The paper's numbers beside mappers, by system (table 17 has none) and column."""
    frame = TABLES[table](load(root, pairs=PAPER_PAIRS))
    rows = frame[frame["system"].isin(SWEPT_CONFIG["variants"])] if "system" in frame else frame.assign(system="sweep")
    found = rows.set_index("system").filter(like="_paper").stack()
    return found.dropna().to_dict()


@pytest.mark.parametrize("changes", OTHER_SHAPES)
def test_another_shape_is_not_the_papers(changes):
    assert is_papers(recipe())
    assert not is_papers(recipe(**changes), LINEAR, ROPES)


@pytest.mark.parametrize(
    "changes", [{"k": 3}, {"lambda": 1.0}, {"corpus": "code", "sequences": 5}, {"dtype": "bfloat16"}]
)
def test_what_is_not_shape_does_not_matter(changes):
    assert is_papers(recipe(**changes))


def test_method_and_rope_are_those_asked_for():
    assert not is_papers(recipe(rope="coupled"))
    assert is_papers(recipe(rope="coupled"), ropes=("coupled",))
    assert not is_papers(recipe(), ropes=("coupled",))
    assert not is_papers(recipe(), methods=("ols",))
    assert is_papers(recipe(method="ols"), methods=("ols",))


def test_ridge_without_a_penalty_is_ols():
    bare = recipe(**{"lambda": 0.0})
    assert method_of(bare) == "ols"
    assert not is_papers(bare)
    assert is_papers(bare, LINEAR)


@pytest.mark.parametrize("changes", [{"width": 64}, {"epochs": 19}, {"patience": 2}])
def test_an_mlp_has_the_papers_width_and_epochs(changes):
    network = recipe(method="mlp", mlp=PAPERS_MLP)
    assert is_papers(network, (NETWORK,))
    assert not is_papers(network)
    assert not is_papers(network | {"mlp": PAPERS_MLP | changes}, (NETWORK,))


@pytest.mark.parametrize("table", WITH_PAPER)
def test_no_table_shows_the_paper_beside_another_shape(tmp_path, table):
    build_swept(tmp_path)
    assert papers(tmp_path, table)
    for changes in OTHER_SHAPES:
        build_swept(tmp_path)
        change(tmp_path, *SWEPT_CONFIG["variants"], **changes)
        assert papers(tmp_path, table) == {}


def test_one_variant_of_another_shape_loses_its_own_number_alone(tmp_path):
    build_swept(tmp_path)
    change(tmp_path, "unturned", "few", "code", "ridge_k1", native_head=4)
    assert papers(tmp_path, "table2_ablation").keys() == {
        (name, f"{column}_paper")
        for name in ("ridge_k8", "unturned_k1_ols")
        for column in ("hellaswag", "prefix_perplexity")
    }
    assert {name for name, _ in papers(tmp_path, "table7_r2_vs_k")} == {"ridge_k8"}
    assert {name for name, _ in papers(tmp_path, "table8_calibration")} == {"lambda_0", "lambda_tiny", "ridge_k8"}
    assert papers(tmp_path, "table9_domain") == {}
    assert papers(tmp_path, "table17_loo_k") == {}


def test_the_ablation_takes_ridge_without_a_penalty_for_ols(tmp_path):
    build_swept(tmp_path)
    before = papers(tmp_path, "table2_ablation")
    change(tmp_path, "unturned_k1_ols", method="ridge")
    assert papers(tmp_path, "table2_ablation") == before
    change(tmp_path, "unturned_k1_ols", **{"lambda": 0.01})
    assert papers(tmp_path, "table2_ablation")["unturned_k1_ols", "hellaswag_paper"] == 44.81


@pytest.mark.parametrize("changes", [{"width": 64}, {"epochs": 2}])
def test_the_papers_mlp_does_not_stand_beside_a_smaller_one(tmp_path, changes):
    build_swept(tmp_path)
    change(tmp_path, "mlp_k8", mlp=PAPERS_MLP | changes)
    assert papers(tmp_path, "table3_mlp") == {("ridge_k8", "hellaswag_retention_paper"): 97.6}


def test_the_papers_ridge_does_not_stand_beside_ols(tmp_path):
    build_swept(tmp_path)
    change(tmp_path, "ridge_k8", method="ols")
    assert papers(tmp_path, "table3_mlp") == {("mlp_k8", "hellaswag_retention_paper"): 97.3}
    assert papers(tmp_path, "table1_retention") == {}


def test_sweeps_of_lambda_and_sequences_may_keep_rope_on(tmp_path):
    build_swept(tmp_path)
    before = papers(tmp_path, "table8_calibration")
    assert {name for name, _ in before} == {"lambda_0", "lambda_tiny", "ridge_k8", "few", "code"}
    change(tmp_path, "lambda_0", "lambda_tiny", "few", "code", rope="coupled")
    assert papers(tmp_path, "table8_calibration").keys() == before.keys() - {("code", "hellaswag_paper")}
    change(tmp_path, "lambda_0", "few", rope="not_reapplied")
    assert {name for name, _ in papers(tmp_path, "table8_calibration")} == {"lambda_tiny", "ridge_k8"}


def test_a_penalty_of_zero_is_a_setting_of_lambda_alone(tmp_path):
    build_swept(tmp_path)
    change(tmp_path, "lambda_0", method="ols")
    change(tmp_path, "few", **{"lambda": 0.0})
    assert {name for name, _ in papers(tmp_path, "table8_calibration")} == {
        "lambda_0",
        "lambda_tiny",
        "ridge_k8",
        "code",
    }


def test_the_papers_size_is_of_any_linear_mapper_of_its_shape(tmp_path):
    build_swept(tmp_path)
    change(tmp_path, "small", support="same_head", native_head=0)
    sizes = papers(tmp_path, "table12_size")
    assert set(sizes.values()) == {1.07e9, 4}
    assert {name for name, _ in sizes} == {"ridge_k8", "unturned", "lambda_0", "lambda_tiny", "few", "code"}


@pytest.mark.parametrize(("corpus", "number"), [("wikipedia-en", 79.65), ("fineweb-edu", 80.70), ("wikipedia", None)])
def test_the_papers_domains_are_those_of_its_own_corpora(tmp_path, corpus, number):
    build_swept(tmp_path)
    change(tmp_path, "code", corpus=corpus)
    beside = {("code", "hellaswag_paper"): number} if number else {}
    for table in ("table8_calibration", "table9_domain"):
        own = {key: value for key, value in papers(tmp_path, table).items() if key == ("code", "hellaswag_paper")}
        assert own == beside
