"""`kvferry show`: a whole mapper is described as its manifest says; a damaged one is refused in one sentence."""

import json
import shutil

import pytest
from small_commands import refusal, run
from small_fits import HOW, SIDES, dump_of, recipe

from kvferry.fit.artifact import Calibration, fit_artifacts
from kvferry.fit.pair import Extent, accumulate
from kvferry.kv.mapper import MANIFEST, WEIGHTS, load_mapper, read_manifest, save_mapper

RANKING = [[2, 0, 1], [1, 0, 2]]
RECIPES = {
    "plain": recipe(),
    "heads": recipe(support="same_head", row_weights="sink"),
    "ols": recipe(0.0, method="ols", k=1, dtype="bfloat16"),
    "mlp": recipe(0.0, method="mlp")
    | {"mlp": {"width": 4, "epochs": 1, "batch": 64, "learning_rate": 1e-3, "patience": 0, "seed": 0}},
}


@pytest.fixture(scope="module")
def mappers(tiny_model, tmp_path_factory):
    """Folders of mappers from 3 layers to 2, by name of the recipe."""
    directory = tmp_path_factory.mktemp("mappers")
    dumps = [
        dump_of(tiny_model("llama", layers, seed=layers), directory, name)
        for layers, name in ((3, "small"), (2, "big"))
    ]
    moments = accumulate(*dumps, Extent(len(SIDES["fit"]), 4, "all", 1000))
    folders = {name: directory / name for name in RECIPES}
    fit_artifacts(Calibration(*dumps, RANKING, moments, 1000), RECIPES, folders)
    return folders


@pytest.fixture
def copy(mappers, tmp_path):
    """A copy of the plain mapper, to be damaged."""
    return shutil.copytree(mappers["plain"], tmp_path / "mapper")


@pytest.mark.parametrize("name", RECIPES)
def test_a_whole_mapper_is_described(mappers, name, capsys):
    status, out, err = run(capsys, "show", mappers[name])
    manifest = read_manifest(mappers[name])
    assert (status, err) == (0, "")
    for word in (
        "whole and unaltered",
        f"{manifest['parameters']:,} parameters in {manifest['dtype']}",
        f"method {RECIPES[name]['method']}",
        f"p = {manifest['features']:,}",
        f"length {HOW['length']}",
        manifest["weights_sha256"],
    ):
        assert word in out
    for layer, read in enumerate(manifest["selected_layers"]):
        assert f"reads {', '.join(map(str, read))}" in out.splitlines()[-len(RANKING) + layer]


def test_r2_is_the_mean_over_layers_and_the_worst(mappers, capsys):
    _, out, _ = run(capsys, "show", mappers["plain"])
    layers = read_manifest(mappers["plain"])["r2"]["held_out"]["v"]
    assert f"V {sum(layers) / 2:.3f} (worst layer {min(layers):.3f})" in out


def test_what_makes_no_difference_to_a_recipe_is_not_shown(mappers, capsys):
    assert "sink_weight 16" in run(capsys, "show", mappers["heads"])[1]
    assert "sink_weight" not in run(capsys, "show", mappers["plain"])[1]


def truncate(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])


def flip(folder):
    whole = bytearray((folder / WEIGHTS).read_bytes())
    whole[-1] ^= 1
    (folder / WEIGHTS).write_bytes(whole)


def edit(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["parameters"] += 1
    (folder / MANIFEST).write_text(json.dumps(manifest))


def older(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 0}))


def halve_a_layer(folder):
    """Weights that were written wrong, with everything else right."""
    manifest = read_manifest(folder)
    mapper, _ = load_mapper(folder, manifest["source"], manifest["target"])
    short = type(mapper.keys[0])(mapper.keys[0].weight[:-1], mapper.keys[0].bias)
    save_mapper(type(mapper)(mapper.selected, [short, mapper.keys[1]], mapper.values, 2), manifest, folder)


def forget_the_recipe(folder):
    manifest = read_manifest(folder)
    mapper, _ = load_mapper(folder, manifest["source"], manifest["target"])
    save_mapper(mapper, {key: value for key, value in manifest.items() if key != "recipe"}, folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, [WEIGHTS, "truncated or altered"]),
        (flip, [WEIGHTS, "truncated or altered"]),
        (lambda folder: (folder / WEIGHTS).unlink(), [WEIGHTS, "missing"]),
        (edit, [MANIFEST, "altered"]),
        (older, [MANIFEST, "format"]),
        (lambda folder: (folder / MANIFEST).write_text("{"), [MANIFEST, "unreadable"]),
        (lambda folder: (folder / MANIFEST).write_text("[]"), [MANIFEST, "not a mapper manifest"]),
        (lambda folder: (folder / MANIFEST).unlink(), ["no mapper", MANIFEST]),
        (halve_a_layer, ["shapes"]),
        (forget_the_recipe, [MANIFEST, "recipe"]),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_damaged_mapper_is_refused_in_one_sentence(copy, damage, words, capsys):
    damage(copy)
    message = refusal(capsys, "show", copy)
    assert str(copy) in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("what", ["absent", "a model", "a file"])
def test_what_is_no_mapper_is_said(tmp_path, what, capsys):
    path = tmp_path / what
    if what == "a model":
        path.mkdir()
        (path / "config.json").write_text("{}")
    if what == "a file":
        path.write_text("text")
    message = refusal(capsys, "show", path)
    assert "no mapper" in message
    assert "RESULTS/pairs/PAIR/mappers/VARIANT" in message
