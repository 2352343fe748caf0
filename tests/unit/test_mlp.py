"""The MLP mapper learns what a matrix cannot, and a fit that is killed, split or repeated gives the same numbers."""

import logging
import re

import pytest
import torch
from safetensors.torch import save_file

from kvferry.errors import KvferryError
from kvferry.files import sha256_file, write_json
from kvferry.fit import mlp as module
from kvferry.fit.mlp import fit_mlp
from kvferry.kv.dump import INDEX
from kvferry.kv.mapper import Network

EXACT = {"rtol": 0, "atol": 0}
SOURCE = {"layers": 3, "kv_heads": 2, "head_dim": 4}
TARGET = {"layers": 2, "kv_heads": 3, "head_dim": 2}
SELECTED = [[2, 0], [1, 2]]
PLACES = len(SELECTED) * 2
LENGTH, PER_SHARD = 20, 4
SIDES = {"fit": 24, "held_out": 8}
HOW = {"width": 24, "epochs": 3, "batch": 64, "learning_rate": 0.003, "patience": 0, "seed": 1}


def recipe(rope="stripped", sequences=SIDES["fit"], dtype="float32", **how):
    return {"mlp": HOW | how, "rope": rope, "sequences": sequences, "dtype": dtype}


def random_rows(geometry, seed):
    """Keys and values of each side `[layers, sequences·LENGTH, kv_heads, head_dim]`."""
    random = torch.Generator().manual_seed(seed)
    shape = (geometry["kv_heads"], geometry["head_dim"])
    return {
        side: {kind: torch.randn(geometry["layers"], count * LENGTH, *shape, generator=random) for kind in ("k", "v")}
        for side, count in SIDES.items()
    }


def planted(x, noise=0.1):
    """A target whose layers are, but for noise, products and absolute values of what they read from the source."""
    random = torch.Generator().manual_seed(5)
    mixing = {
        (kind, layer): [torch.randn(16, 6, generator=random) / 4 for _ in range(3)]
        for kind in ("k", "v")
        for layer in range(len(SELECTED))
    }

    def output(kind, layer, own):
        read = torch.cat([own[source].flatten(1) for source in SELECTED[layer]], 1)
        first, second, third = (read @ matrix for matrix in mixing[kind, layer])
        clean = first.abs() + second * third + 5
        return (clean + noise * torch.randn(clean.shape, generator=random)).unflatten(1, (3, 2))

    return {
        side: {kind: torch.stack([output(kind, layer, kinds[kind]) for layer in range(2)]) for kind in ("k", "v")}
        for side, kinds in x.items()
    }


def write_rows(directory, rows, geometry, angle=0.0):
    """A dump of given keys and values, rotated by `angle` a position as far as its reader is told."""
    directory.mkdir(parents=True)
    shards = []
    angles = angle * torch.arange(LENGTH)[:, None].expand(-1, geometry["head_dim"])
    for side, kinds in rows.items():
        for start in range(0, SIDES[side], PER_SHARD):
            own = slice(start * LENGTH, (start + PER_SHARD) * LENGTH)
            tensors = {
                f"{kind}.{i}": layer[own].contiguous() for kind, part in kinds.items() for i, layer in enumerate(part)
            }
            tensors["ids"] = torch.arange(PER_SHARD * LENGTH)
            tensors["positions"] = torch.arange(LENGTH).repeat(PER_SHARD)
            tensors["sequences"] = (torch.arange(PER_SHARD) + start).repeat_interleave(LENGTH)
            tensors |= {"cos": angles.cos(), "sin": angles.sin()}
            path = directory / f"{side}-{start}.safetensors"
            save_file(tensors, path)
            shards.append({"file": path.name, "side": side, "sequences": PER_SHARD, "sha256": sha256_file(path)})
    identity = {"model": directory.name, "tokenizer_sha256": "same"}
    write_json(directory / INDEX, {"identity": identity, "geometry": geometry, "calibration": {}, "shards": shards})
    return directory


def write_pair(directory, x, y, angle=0.0):
    return write_rows(directory / "source", x, SOURCE, angle), write_rows(directory / "target", y, TARGET, angle)


X = random_rows(SOURCE, 1)
Y = planted(X)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Dumps of a planted pair, with a rotation that does nothing."""
    return write_pair(tmp_path_factory.mktemp("planted"), X, Y)


def same_numbers(mapper, other):
    for own, twin in zip((*mapper.keys, *mapper.values), (*other.keys, *other.values), strict=True):
        torch.testing.assert_close(own.tensors(), twin.tensors(), **EXACT)


def rows_of(x, y, side, kind, layer):
    return [x[side][kind][source].flatten(1) for source in SELECTED[layer]], y[side][kind][layer].flatten(1)


def mapped(mapper, x, side, kind, layer):
    maps = mapper.keys if kind == "k" else mapper.values
    return maps[layer].blocks([x[side][kind][source].flatten(1) for source in SELECTED[layer]])


def r2(predicted, true):
    """Pooled over the coordinates of each head, averaged over heads, about the rows' own mean."""
    error, total = (part.square().sum(0).view(3, 2).sum(1) for part in (predicted - true, true - true.mean(0)))
    return float((1 - error / total).mean())


def loss_lines(caplog, side):
    """Losses by epoch that were logged for a side, a list a place."""
    lines = [record.getMessage() for record in caplog.records if f": {side} loss by epoch" in record.getMessage()]
    return {
        line.split(":")[0].removeprefix("mlp, "): [float(n) for n in re.findall(r"\d+\.\d+", line)] for line in lines
    }


def test_it_learns_on_held_out_rows_what_no_affine_map_can(dumps, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    mapper = fit_mlp(*dumps, SELECTED, recipe(width=48, epochs=60), tmp_path / "c")
    losses = loss_lines(caplog, "fit")
    assert len(losses) == PLACES
    for kind in ("k", "v"):
        for layer in range(2):
            parts, true = rows_of(X, Y, "held_out", kind, layer)
            fit_parts, fit_true = rows_of(X, Y, "fit", kind, layer)
            features = torch.cat([*fit_parts, torch.ones(len(fit_true), 1)], 1)
            weight = torch.linalg.lstsq(features.double(), fit_true.double()).solution
            affine = torch.cat([*parts, torch.ones(len(true), 1)], 1).double() @ weight
            found = r2(mapped(mapper, X, "held_out", kind, layer), true)
            assert found > r2(affine, true) + 0.3
            assert found > 0.4
            steps = losses[f"target layer {layer}, {kind}"]
            assert len(steps) == 60
            assert steps[0] > 0.9
            # The mean over the epoch's batches, each before its step, is above what the last weights reach.
            inside = 1 - r2(mapped(mapper, X, "fit", kind, layer), fit_true)
            assert inside < steps[-1] < inside + 0.1


def test_the_mapper_has_the_recipes_shape_rope_and_dtype(dumps, tmp_path):
    mapper = fit_mlp(*dumps, SELECTED, recipe("not_reapplied", dtype="bfloat16", epochs=1), tmp_path / "c")
    assert (mapper.selected, mapper.kv_heads, mapper.rope) == (SELECTED, 3, "not_reapplied")
    assert mapper.dtype == torch.bfloat16
    assert all(type(own) is Network for own in (*mapper.keys, *mapper.values))
    assert mapper.parameters == PLACES * 3 * (16 * 24 + 24 * 24 + 24 * 2)


def test_one_seed_gives_one_mapper_and_another_seed_another(dumps, tmp_path):
    first, again = (fit_mlp(*dumps, SELECTED, recipe(), tmp_path / name) for name in ("a", "b"))
    same_numbers(first, again)
    other = fit_mlp(*dumps, SELECTED, recipe(seed=2), tmp_path / "c")
    assert not torch.equal(first.keys[0].first, other.keys[0].first)


def test_every_layer_and_kind_starts_from_weights_of_its_own(dumps, tmp_path):
    still = fit_mlp(*dumps, SELECTED, recipe(learning_rate=1e-30), tmp_path / "c")
    starts = [own.second for own in (*still.keys, *still.values)]
    assert all(not torch.equal(one, other) for i, one in enumerate(starts) for other in starts[:i])


def trained(monkeypatch, fail_at=None):
    """Count calls of the training of a place; the call number `fail_at` fails as if killed."""
    calls, train = [], module._train

    def counted(task, place, *rest):
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        calls.append(place)
        return train(task, place, *rest)

    monkeypatch.setattr(module, "_train", counted)
    return calls


@pytest.mark.parametrize("finished", range(PLACES))
def test_a_killed_fit_goes_on_where_it_was_with_the_numbers_of_an_unbroken_one(finished, dumps, tmp_path, monkeypatch):
    unbroken = fit_mlp(*dumps, SELECTED, recipe(patience=2), tmp_path / "unbroken")
    with monkeypatch.context() as patch:
        trained(patch, fail_at=finished)
        with pytest.raises(KeyboardInterrupt):
            fit_mlp(*dumps, SELECTED, recipe(patience=2), tmp_path / "c")
    assert len(list((tmp_path / "c").glob("*"))) == finished
    calls = trained(monkeypatch)
    same_numbers(fit_mlp(*dumps, SELECTED, recipe(patience=2), tmp_path / "c"), unbroken)
    assert len(calls) == PLACES - finished
    same_numbers(fit_mlp(*dumps, SELECTED, recipe(patience=2), tmp_path / "c"), unbroken)
    assert len(calls) == PLACES - finished


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 2},
        {"epochs": 2},
        {"width": 25},
        {"batch": 65},
        {"learning_rate": 0.004},
        {"patience": 1},
        {"sequences": 12},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_another_recipe_left_is_not_taken_over(changed, dumps, tmp_path, monkeypatch):
    fit_mlp(*dumps, SELECTED, recipe(), tmp_path / "c")
    calls = trained(monkeypatch)
    found = fit_mlp(*dumps, SELECTED, recipe(**changed), tmp_path / "c")
    assert len(calls) == PLACES
    same_numbers(found, fit_mlp(*dumps, SELECTED, recipe(**changed), tmp_path / "fresh"))


def test_only_layers_that_read_other_layers_are_trained_again(dumps, tmp_path, monkeypatch):
    fit_mlp(*dumps, SELECTED, recipe(), tmp_path / "c")
    calls = trained(monkeypatch)
    fit_mlp(*dumps, [SELECTED[0], [2, 1]], recipe(), tmp_path / "c")
    assert calls == [("k", 1), ("v", 1)]


def test_other_rows_are_trained_on_again(tmp_path, dumps, monkeypatch):
    fit_mlp(*dumps, SELECTED, recipe(), tmp_path / "c")
    calls = trained(monkeypatch)
    other = write_pair(tmp_path / "other", X, planted(X, noise=0.2))
    fit_mlp(*other, SELECTED, recipe(), tmp_path / "c")
    assert len(calls) == PLACES


@pytest.mark.parametrize("content", [b"", b"broken", None])
def test_a_damaged_file_of_a_finished_layer_is_made_again(content, dumps, tmp_path, monkeypatch):
    whole = fit_mlp(*dumps, SELECTED, recipe(), tmp_path / "c")
    path = tmp_path / "c" / "v.1.safetensors"
    damaged = path.read_bytes()[:-1] if content is None else content
    path.unlink()  # the tensors of `whole` are mapped from this file
    path.write_bytes(damaged)
    calls = trained(monkeypatch)
    same_numbers(fit_mlp(*dumps, SELECTED, recipe(), tmp_path / "c"), whole)
    assert calls == [("v", 1)]


def megabytes(sources, outputs, sequences=SIDES["fit"]):
    return 4 * sequences * LENGTH * (8 * sources + 6 * outputs) / 1e6


def test_less_memory_means_more_passes_and_the_same_numbers(dumps, tmp_path, monkeypatch):
    whole = fit_mlp(*dumps, SELECTED, recipe(), tmp_path / "a")
    reads, read = [], module._read
    monkeypatch.setattr(module, "_read", lambda *of: reads.append(of) or read(*of))
    for limit, passes in ((megabytes(6, 4), 1), (megabytes(6, 4) - 1e-6, 2), (megabytes(2, 1), 4)):
        reads.clear()
        same_numbers(fit_mlp(*dumps, SELECTED, recipe(), tmp_path / str(limit), limit), whole)
        assert len(reads) == passes


@pytest.mark.parametrize("patience", [0, 1])
def test_too_little_memory_is_refused_with_what_is_needed(patience, dumps, tmp_path):
    needed = megabytes(2, 1, SIDES["fit"] + (SIDES["held_out"] if patience else 0))
    fit_mlp(*dumps, SELECTED, recipe(patience=patience), tmp_path / "c", needed)
    with pytest.raises(KvferryError, match=r"target layer 0, k: .* raise fit.memory_mb to 1, or use a smaller k"):
        fit_mlp(*dumps, SELECTED, recipe(patience=patience), tmp_path / "d", needed - 1e-6)


def test_patience_keeps_the_epoch_with_the_smallest_held_out_error(tmp_path, caplog):
    """A target of noise: the best map is the mean, and every epoch after the first few is worse."""
    caplog.set_level(logging.INFO)
    noise = random_rows(TARGET, 9)
    pair = write_pair(tmp_path, X, noise)
    how = {"epochs": 40, "width": 48, "learning_rate": 0.01, "patience": 3}
    mapper = fit_mlp(*pair, SELECTED, recipe(**how), tmp_path / "c")
    losses = loss_lines(caplog, "held_out")
    fit_losses = loss_lines(caplog, "fit")
    assert len(losses) == PLACES
    for place, steps in losses.items():
        lowest = steps.index(min(steps))
        assert len(steps) == len(fit_losses[place]) == lowest + 1 + 3 < 40
        # the same training, stopped by its number of epochs right there
        short = recipe(**how | {"epochs": lowest + 1, "patience": 0})
        shorter = fit_mlp(*pair, SELECTED, short, tmp_path / f"{lowest + 1}")
        layer, kind = int(place.split()[2].rstrip(",")), place[-1]
        own, twin = ((m.keys if kind == "k" else m.values)[layer].tensors() for m in (mapper, shorter))
        torch.testing.assert_close(own, twin, **EXACT)
        true = noise["held_out"][kind][layer].flatten(1)
        spread = noise["fit"][kind][layer].flatten(1).var(0, correction=0).view(3, 2).mean(1)
        errors = (mapped(mapper, X, "held_out", kind, layer) - true).square().mean(0).view(3, 2).mean(1)
        assert float((errors / spread).mean()) == pytest.approx(min(steps), abs=1e-4)


def test_without_a_worse_epoch_patience_changes_nothing(dumps, tmp_path):
    same_numbers(
        fit_mlp(*dumps, SELECTED, recipe(patience=3), tmp_path / "a"),
        fit_mlp(*dumps, SELECTED, recipe(), tmp_path / "b"),
    )


def test_units_and_offsets_of_features_and_outputs_do_not_matter(dumps, tmp_path):
    """A change of units of each source coordinate, of each target head, and offsets of both, carry over to the map."""
    random = torch.Generator().manual_seed(4)
    unit, offset = (torch.randn(2, 4, generator=random) for _ in range(2))
    unit = 10**unit
    head_unit, head_offset = torch.tensor([0.01, 1.0, 300.0])[:, None], torch.randn(3, 2, generator=random)
    x = {side: {kind: part * unit + offset for kind, part in kinds.items()} for side, kinds in X.items()}
    y = {side: {kind: part * head_unit + head_offset for kind, part in kinds.items()} for side, kinds in Y.items()}
    plain = fit_mlp(*dumps, SELECTED, recipe(), tmp_path / "a")
    other = fit_mlp(*write_pair(tmp_path, x, y), SELECTED, recipe(), tmp_path / "b")
    for kind in ("k", "v"):
        for layer in range(2):
            wanted = mapped(plain, X, "held_out", kind, layer).unflatten(1, (3, 2)) * head_unit + head_offset
            found = mapped(other, x, "held_out", kind, layer).unflatten(1, (3, 2))
            assert ((found - wanted).abs() / head_unit).max() < 0.01


def test_numbers_that_never_change_do_no_harm(tmp_path):
    x = {side: {kind: part.clone() for kind, part in kinds.items()} for side, kinds in X.items()}
    y = {side: {kind: part.clone() for kind, part in kinds.items()} for side, kinds in Y.items()}
    for side in SIDES:
        x[side]["k"][2, :, 1, 3] = 7.0
        y[side]["v"][0, :, 1] = -4.0
    mapper = fit_mlp(*write_pair(tmp_path, x, y), SELECTED, recipe(epochs=60), tmp_path / "c")
    assert all(tensor.isfinite().all() for own in (*mapper.keys, *mapper.values) for tensor in own.tensors().values())
    constant = mapped(mapper, x, "held_out", "v", 0)[:, 2:4]
    assert (constant + 4).abs().max() < 0.3


def test_a_head_learns_the_same_whatever_the_other_heads_have_to_learn(dumps, tmp_path):
    y = {side: {kind: part.clone() for kind, part in kinds.items()} for side, kinds in Y.items()}
    for side, kinds in y.items():
        for kind in kinds:
            kinds[kind][:, :, 1:] = random_rows(TARGET, 8)[side][kind][:, :, 1:]
    plain = fit_mlp(*dumps, SELECTED, recipe(), tmp_path / "a")
    other = fit_mlp(*write_pair(tmp_path, X, y), SELECTED, recipe(), tmp_path / "b")
    for kind in ("k", "v"):
        own, twin = (mapped(mapper, X, "held_out", kind, 0) for mapper in (plain, other))
        torch.testing.assert_close(own[:, :2], twin[:, :2], rtol=1e-4, atol=1e-4)
        assert (own[:, 2:] - twin[:, 2:]).abs().max() > 0.1


def test_rows_of_later_sequences_are_not_read(dumps, tmp_path):
    y = {side: {kind: part.clone() for kind, part in kinds.items()} for side, kinds in Y.items()}
    for kind in y["fit"]:
        y["fit"][kind][:, 10 * LENGTH :] = torch.nan
    other = write_pair(tmp_path, X, y)
    same_numbers(
        fit_mlp(*other, SELECTED, recipe(sequences=10), tmp_path / "a"),
        fit_mlp(*dumps, SELECTED, recipe(sequences=10), tmp_path / "b"),
    )


def test_keys_are_stripped_unless_the_recipe_is_coupled(dumps, tmp_path):
    """Dumps with the same numbers but a rotation: coupled must see the numbers, the others what they were before rotation."""
    turning = write_pair(tmp_path / "turning", X, Y, angle=0.3)
    as_they_are = fit_mlp(*dumps, SELECTED, recipe(), tmp_path / "a")
    coupled = fit_mlp(*turning, SELECTED, recipe("coupled"), tmp_path / "b")
    same_numbers(coupled, as_they_are)
    assert coupled.rope == "coupled"
    stripped = fit_mlp(*turning, SELECTED, recipe(), tmp_path / "c")
    same_numbers(fit_mlp(*turning, SELECTED, recipe("not_reapplied"), tmp_path / "c"), stripped)
    for layer in range(2):
        torch.testing.assert_close(stripped.values[layer].tensors(), as_they_are.values[layer].tensors(), **EXACT)
        assert (stripped.keys[layer].first - as_they_are.keys[layer].first).abs().max() > 1e-3


def test_training_that_diverges_is_refused_by_name(dumps, tmp_path):
    with pytest.raises(
        KvferryError, match=r"target layer 0, k: training of the mlp diverged; use a smaller mlp\.learn"
    ):
        fit_mlp(*dumps, SELECTED, recipe(learning_rate=1e30), tmp_path / "c")


def test_dumps_of_other_tokenizers_are_refused(dumps, tmp_path):
    other = write_rows(tmp_path / "other", Y, TARGET)
    index = {"identity": {"model": "other", "tokenizer_sha256": "another"}, "geometry": TARGET, "calibration": {}}
    write_json(other / INDEX, index | {"shards": []})
    with pytest.raises(KvferryError, match="different tokenizers"):
        fit_mlp(dumps[0], other, SELECTED, recipe(), tmp_path / "c")
