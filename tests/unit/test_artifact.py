"""Artifacts of a fit job: each recipe's own fit, with a manifest that says all of it; what fails or is killed leaves none."""

import json

import pytest
import torch
from small_fits import HOW, SIDES, dump_of, fitted, recipe

from kvferry.errors import KvferryError
from kvferry.files import sha256_file
from kvferry.fit import artifact as job
from kvferry.fit import mlp
from kvferry.fit.artifact import Calibration, checkpoint_of, fit_artifacts
from kvferry.fit.pair import KINDS, Extent, accumulate
from kvferry.fit.quality import applied_r2
from kvferry.fit.ridge import fit_ridge
from kvferry.fit.rows import check_match
from kvferry.fit.systems import SummedSystems
from kvferry.fit.weights import RowRule
from kvferry.kv.dump import read_index
from kvferry.kv.mapper import MANIFEST, WEIGHTS, Network, load_mapper

COUNT = len(SIDES["fit"])
ROWS = SIDES["fit"].numel()
RANKING = [[2, 0, 1], [1, 0, 2], [0, 1, 2], [2, 1, 0]]
LAYERS = list(range(4))
NETWORK = {"width": 6, "epochs": 2, "batch": 64, "learning_rate": 1e-3, "patience": 0, "seed": 0}


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def models(tiny_model):
    return tiny_model("llama", 3, seed=1), tiny_model("llama", 4, seed=2, kv_heads=4)


@pytest.fixture(scope="module")
def dumps(models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dumps")
    return dump_of(models[0], directory, "small"), dump_of(models[1], directory, "big", row_weights=True)


@pytest.fixture(scope="module")
def moments(dumps):
    return accumulate(*dumps, Extent(COUNT, 4, "all", 1000))


def written(dumps, moments, directory, recipes, memory_mb=1000):
    """Fit recipes; the folder of each."""
    directories = {name: directory / name for name in recipes}
    fit_artifacts(Calibration(*dumps, RANKING, moments, memory_mb), recipes, directories)
    return directories


def manifest_of(directory):
    return json.loads((directory / MANIFEST).read_text())


def loaded(dumps, directory):
    return load_mapper(directory, *(read_index(dump)["identity"] for dump in dumps))[0]


def assert_same_maps(one, other, **tolerance):
    assert one.selected == other.selected
    assert one.rope == other.rope
    for own, wanted in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        assert type(own) is type(wanted)
        for name, tensor in own.tensors().items():
            torch.testing.assert_close(tensor, wanted.tensors()[name], **tolerance)


@pytest.fixture(scope="module")
def artifact(dumps, moments, tmp_path_factory):
    return written(dumps, moments, tmp_path_factory.mktemp("mappers"), {"ridge_k2": recipe()})["ridge_k2"]


def test_a_manifest_says_all_that_the_mapper_is(dumps, artifact):
    manifest = manifest_of(artifact)
    indices = check_match(*dumps)
    assert manifest["recipe"] == recipe()
    assert manifest["source"] == indices["source"]["identity"]
    assert manifest["target"] == indices["target"]["identity"]
    assert {"config_sha256", "tokenizer_sha256", "weights_id", "model", "origin"} == set(manifest["source"])
    assert manifest["calibration"] == HOW
    assert len(manifest["calibration_sha256"]) == 64
    assert manifest["rows"] == ROWS
    assert manifest["features"] == 2 * 2 * 8
    assert manifest["held_out_rows"] == SIDES["held_out"].numel()
    assert manifest["weights_sha256"] == sha256_file(artifact / WEIGHTS)
    assert manifest["weights_bytes"] == (artifact / WEIGHTS).stat().st_size
    assert manifest["selected_layers"] == [layers[:2] for layers in RANKING]
    # 2·L_t·n_kv_t·(k·n_kv_s·d_s)·d_t
    assert manifest["parameters"] == 2 * 4 * 4 * (2 * 2 * 8) * 8
    assert manifest["dtype"] == "float32"


def test_a_manifest_holds_both_r2_of_every_layer(dumps, moments, artifact):
    r2 = manifest_of(artifact)["r2"]
    fit = fitted(moments, RANKING, recipe())
    outside, _ = applied_r2({"own": fit.mapper}, *dumps)
    for kind in KINDS:
        assert r2["in_sample"][kind] == pytest.approx(fit.r2[kind], abs=1e-9)
        assert r2["held_out"][kind] == pytest.approx(outside["own"][kind], abs=1e-6)


def test_an_artifact_loads_again_and_maps_as_before(dumps, moments, artifact):
    assert_same_maps(loaded(dumps, artifact), fitted(moments, RANKING, recipe()).mapper)


RECIPES = {
    "plain": recipe(),
    "all": recipe(k="all"),
    "sink": recipe(row_weights="sink", k=3),
    "left_out": recipe(native_head=3, head_rows="left_out", support="all_heads"),
    "head_kept": recipe(native_head=3, dtype="bfloat16"),
    "both": recipe(1.0, row_weights="sink", native_head=2, head_rows="left_out", lambda_scale="sum"),
    "free": recipe(0.0, method="ols", k=1, rope="not_reapplied"),
}


@pytest.fixture(scope="module")
def several(dumps, moments, tmp_path_factory):
    return written(dumps, moments, tmp_path_factory.mktemp("several"), RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_that_weigh_rows_differently_are_fitted_in_one_call(dumps, several, name):
    own = RECIPES[name]
    systems = SummedSystems(*dumps, COUNT, RowRule.of(own), [sorted(r) for r in RANKING], [LAYERS])
    wanted = fit_ridge(systems, RANKING, {"own": own})["own"]
    close = {"rtol": 1e-2, "atol": 1e-3} if own["dtype"] == "bfloat16" else {"rtol": 1e-3, "atol": 1e-5}
    assert_same_maps(loaded(dumps, several[name]), wanted.mapper, **close)
    manifest = manifest_of(several[name])
    for kind in KINDS:
        assert manifest["r2"]["in_sample"][kind] == pytest.approx(wanted.r2[kind], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "rows", "features", "dtype"),
    [
        ("plain", ROWS, 32, "float32"),
        ("all", ROWS, 48, "float32"),
        ("sink", ROWS, 48, "float32"),
        ("left_out", ROWS - 3 * COUNT, 32, "float32"),
        ("head_kept", ROWS, 32, "bfloat16"),
        ("both", ROWS - 2 * COUNT, 32, "float32"),
        ("free", ROWS, 16, "float32"),
    ],
)
def test_each_manifest_is_its_recipes_own(several, name, rows, features, dtype):
    manifest = manifest_of(several[name])
    assert manifest["recipe"] == RECIPES[name]
    assert manifest["rows"] == rows
    assert manifest["features"] == features
    assert manifest["dtype"] == dtype
    assert manifest["rope"] == RECIPES[name]["rope"]


def test_all_layers_share_one_order_of_features(several):
    assert manifest_of(several["all"])["selected_layers"] == [[0, 1, 2]] * 4


def test_features_of_one_head_are_counted_as_such(dumps, tmp_path):
    target = (dumps[1], dumps[1])
    found = written(target, None, tmp_path, {"own": recipe(support="same_head")})
    manifest = manifest_of(found["own"])
    assert manifest["features"] == 2 * 8
    assert manifest["parameters"] == 2 * 4 * 4 * (2 * 8) * 8


@pytest.mark.parametrize(("memory", "passes"), [(10**9, 1), (400_000, 2), (350_000, 4)])
def test_without_moments_of_all_columns_the_rows_are_read_again(dumps, several, tmp_path, monkeypatch, memory, passes):
    heads_alone = accumulate(*dumps, Extent(COUNT, 0, 1, 1000))
    chosen = {name: RECIPES[name] for name in ("plain", "left_out", "both")}
    prepared, prepare = [], SummedSystems.prepare
    monkeypatch.setattr(SummedSystems, "prepare", lambda own, layers: prepared.append(layers) or prepare(own, layers))
    monkeypatch.setattr(job, "MB", 1)
    found = written(dumps, heads_alone, tmp_path, chosen, memory)
    assert len(prepared) == passes * len(chosen)
    assert sorted(layer for layers in prepared for layer in layers) == sorted(LAYERS * len(chosen))
    for name, directory in found.items():
        close = {"rtol": 1e-3, "atol": 1e-5}
        assert_same_maps(loaded(dumps, directory), loaded(dumps, several[name]), **close)
        assert manifest_of(directory)["rows"] == manifest_of(several[name])["rows"]


def test_too_little_memory_for_one_target_layer_says_so(dumps, tmp_path):
    with pytest.raises(KvferryError, match=r"fit\.memory_mb: 0 MB is too little"):
        written(dumps, None, tmp_path, {"own": recipe()}, memory_mb=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [{"rope": "coupled"}, {"row_weights": "attention"}, {"sequences": 4}],
    ids=["coupled", "attention", "few"],
)
def test_rows_that_the_moments_are_not_of_are_summed(dumps, tmp_path, changes):
    own = recipe(**changes)
    (directory,) = written(dumps, None, tmp_path, {"own": own}).values()
    coupled = own["rope"] == "coupled"
    systems = SummedSystems(*dumps, own["sequences"], RowRule.of(own), RANKING, [LAYERS], coupled)
    wanted = fit_ridge(systems, RANKING, {"own": own})["own"].mapper
    assert_same_maps(loaded(dumps, directory), wanted, rtol=1e-3, atol=1e-5)
    manifest = manifest_of(directory)
    assert manifest["rows"] == own["sequences"] * SIDES["fit"].shape[1]
    held_out, _ = applied_r2({"own": wanted}, *dumps)
    assert manifest["r2"]["held_out"]["k"] == pytest.approx(held_out["own"]["k"], abs=1e-5)


def test_another_calibration_has_another_fingerprint(models, artifact, tmp_path):
    sides = {"fit": SIDES["fit"] + 1, "held_out": SIDES["held_out"]}
    others = [dump_of(model, tmp_path, name, sides=sides) for model, name in zip(models, ("small", "big"), strict=True)]
    (other,) = written(others, None, tmp_path / "mappers", {"own": recipe()}).values()
    assert manifest_of(artifact)["calibration_sha256"] != manifest_of(other)["calibration_sha256"]


def test_a_fit_that_stops_leaves_no_artifact(dumps, tmp_path):
    moments = accumulate(*dumps, Extent(COUNT, 4, "all", 1000))
    moments.full["v"].xx[0, 0] = float("nan")
    for own in (recipe(k=1), recipe(k=1, row_weights="sink")):
        with pytest.raises(KvferryError, match="target layer 2, v: "):
            fit_artifacts(
                Calibration(*dumps, [[1], [1], [0], [1]], moments, 1000), {"own": own}, {"own": tmp_path / "own"}
            )
        assert list(tmp_path.iterdir()) == []


def network(**changes):
    return recipe(0.0, method="mlp", k=2, mlp=NETWORK | changes)


@pytest.fixture(scope="module")
def trained(dumps, tmp_path_factory):
    return written(dumps, None, tmp_path_factory.mktemp("mlp"), {"mlp": network()})["mlp"]


def test_an_mlp_is_written_like_any_other(dumps, trained):
    mapper, manifest = loaded(dumps, trained), manifest_of(trained)
    assert {type(own) for own in (*mapper.keys, *mapper.values)} == {Network}
    assert mapper.selected == [layers[:2] for layers in RANKING]
    assert manifest["recipe"] == network()
    assert (manifest["rows"], manifest["features"]) == (ROWS, 32)
    # a head: features·width + width² + width·head_dim
    assert manifest["parameters"] == 2 * 4 * 4 * (32 * 6 + 6 * 6 + 6 * 8)
    held_out, count = applied_r2({"own": mapper}, *dumps)
    inside, _ = applied_r2({"own": mapper}, *dumps, COUNT)
    assert manifest["held_out_rows"] == count
    assert manifest["r2"] == {"in_sample": inside["own"], "held_out": held_out["own"]}


def test_an_mlp_of_fewer_sequences_is_scored_on_those(dumps, tmp_path):
    (directory,) = written(dumps, None, tmp_path, {"mlp": network() | {"sequences": 4}}).values()
    manifest = manifest_of(directory)
    inside, count = applied_r2({"own": loaded(dumps, directory)}, *dumps, 4)
    assert manifest["rows"] == count == 4 * SIDES["fit"].shape[1]
    assert manifest["r2"]["in_sample"] == inside["own"]


def test_an_mlp_leaves_nothing_but_its_artifact(trained):
    assert [path.name for path in trained.parent.iterdir()] == [trained.name]


def test_a_killed_mlp_goes_on_with_what_it_had_and_ends_with_the_same_numbers(dumps, trained, tmp_path, monkeypatch):
    train, seen = mlp._train, []

    def train_some(task, place, *rest):
        seen.append(place)
        if len(seen) == 4:
            raise Killed
        return train(task, place, *rest)

    monkeypatch.setattr(mlp, "_train", train_some)
    with pytest.raises(Killed):
        written(dumps, None, tmp_path, {"mlp": network()})
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_of(tmp_path / "mlp").name]
    assert len(list(checkpoint_of(tmp_path / "mlp").iterdir())) == 3
    before = seen[:3]
    seen[:] = []
    monkeypatch.setattr(mlp, "_train", lambda task, place, *rest: seen.append(place) or train(task, place, *rest))
    (directory,) = written(dumps, None, tmp_path, {"mlp": network()}).values()
    assert sorted([*before, *seen]) == [(kind, layer) for kind in KINDS for layer in LAYERS]
    assert_same_maps(loaded(dumps, directory), loaded(dumps, trained), rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mlp"]


def test_an_mlp_that_diverges_leaves_no_artifact(dumps, tmp_path):
    with pytest.raises(KvferryError, match=r"target layer 0, k: training of the mlp diverged"):
        written(dumps, None, tmp_path, {"mlp": network(learning_rate=1e30)})
    assert not (tmp_path / "mlp").exists()
