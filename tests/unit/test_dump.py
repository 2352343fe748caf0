"""A dump holds the model's own cache, row for row; a killed dump goes on where it was; altered shards are refused."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from small_fits import flip_a_byte

from kvferry.errors import KvferryError
from kvferry.files import read_json
from kvferry.kv import dump, marked
from kvferry.kv.attention import observed, row_weights
from kvferry.kv.dump import INDEX, SHARD_SEQUENCES, read_index, read_shards, write_dump

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LENGTH = 20
CARD = {
    "model": "tiny",
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 8,
    "config_sha256": "c",
    "tokenizer_sha256": "t",
    "weights_id": "w",
    "origin": "of a test",
}


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", 2)


@pytest.fixture(scope="module")
def sequences():
    torch.manual_seed(12)
    return {"fit": torch.randint(3, 250, (SHARD_SEQUENCES + 3, LENGTH)), "held_out": torch.randint(3, 250, (5, LENGTH))}


def how(stride=1):
    return {"stride": stride, "corpus": "prose"}


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@torch.inference_mode()
def own_cache(model, ids):
    """By transformers alone: keys and values a layer, `[sequences, kv_heads, tokens, head_dim]`."""
    return [(layer.keys, layer.values) for layer in model(ids, use_cache=True).cache.layers]


@pytest.mark.parametrize("stride", [1, 3])
def test_shards_hold_exactly_the_rows_of_the_models_own_cache(stride, model, sequences, tmp_path):
    write_dump(model, CARD, sequences, how(stride), tmp_path)
    kept = list(range(0, LENGTH, stride))
    for side, ids in sequences.items():
        expected, seen = own_cache(model, ids), 0
        for shard in read_shards(tmp_path, side):
            for row in range(len(shard.ids)):
                sequence, token = int(shard.sequences[row]), int(shard.positions[row])
                assert (sequence, token) == (seen // len(kept), kept[seen % len(kept)])
                assert int(shard.ids[row]) == int(ids[sequence, token])
                for layer, (keys, values) in enumerate(expected):
                    torch.testing.assert_close(shard.keys[layer][row], keys[sequence, :, token], **CLOSE)
                    torch.testing.assert_close(shard.values[layer][row], values[sequence, :, token], **CLOSE)
                seen += 1
        assert seen == len(ids) * len(kept)


@pytest.mark.parametrize("kind", ["yarn", "partial"])
@pytest.mark.parametrize("stride", [1, 3])
def test_stripped_keys_of_a_shard_are_the_keys_before_rotation(kind, stride, tiny_model, sequences, tmp_path):
    model = tiny_model(kind, 2)
    ids = sequences["held_out"]
    write_dump(model, CARD, {"held_out": ids}, how(stride), tmp_path)
    before = []
    hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda _m, _i, out: before.append(out))
    own_cache(model, ids)
    hook.remove()
    wanted = before[0][:, ::stride].reshape(-1, 2, 8)
    (shard,) = read_shards(tmp_path, "held_out")
    torch.testing.assert_close(shard.stripped_keys(1), wanted, **CLOSE)
    assert (shard.keys[1] - wanted).abs().max() > 0.1


def test_the_dump_keeps_the_dtype_of_the_forward(tiny_model, sequences, tmp_path):
    write_dump(tiny_model("llama", 2).bfloat16(), CARD, {"fit": sequences["fit"][:2]}, how(), tmp_path)
    (shard,) = read_shards(tmp_path, "fit")
    assert {part.dtype for part in (*shard.keys, *shard.values)} == {torch.bfloat16}
    assert shard.stripped_keys(0).dtype == torch.float32
    assert read_index(tmp_path)["dtype"] == "torch.bfloat16"


@pytest.mark.parametrize("stride", [1, 3])
def test_weights_of_the_kept_rows_take_all_tokens_as_queries(stride, model, sequences, tmp_path):
    """The last query is never kept with a stride of 3: without it, and without the other dropped ones, the sums differ."""
    write_dump(model, CARD, sequences, how(stride), tmp_path, row_weights=True)
    for side, ids in sequences.items():
        with observed(model, row_weights) as seen:
            model(ids, use_cache=True)
        for shard in read_shards(tmp_path, side):
            for kind, found in enumerate((shard.key_weights, shard.value_weights)):
                for layer, rows in enumerate(found):
                    assert (rows.shape, rows.dtype) == ((len(shard.ids), 2), torch.float32)
                    wanted = seen[layer][kind][shard.sequences, :, shard.positions]
                    torch.testing.assert_close(rows, wanted, rtol=1e-3, atol=1e-4)


def test_keys_and_values_are_the_same_with_weights_and_a_dump_without_has_none(model, sequences, tmp_path):
    write_dump(model, CARD, sequences, how(3), tmp_path / "plain")
    write_dump(model, CARD, sequences, how(3), tmp_path / "weighted", row_weights=True)
    both = (read_shards(tmp_path / name, "fit") for name in ("plain", "weighted"))
    for plain, weighted in zip(*both, strict=True):
        assert (plain.key_weights, plain.value_weights) == (None, None)
        assert len(weighted.key_weights) == len(weighted.value_weights) == len(plain.keys)
        torch.testing.assert_close(weighted.keys, plain.keys, **CLOSE)
        torch.testing.assert_close(weighted.values, plain.values, **CLOSE)
        for name in ("ids", "positions", "sequences"):
            assert torch.equal(getattr(weighted, name), getattr(plain, name))
    plain, weighted = (read_index(tmp_path / name) for name in ("plain", "weighted"))
    assert "row_weights" not in plain
    assert weighted["row_weights"] is True
    assert weighted["calibration"] == plain["calibration"]


def test_a_plain_dump_is_made_by_the_models_own_attention(model, sequences, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("observed")

    monkeypatch.setattr(dump, "observed", refuse)
    write_dump(model, CARD, {"held_out": sequences["held_out"]}, how(), tmp_path)
    (shard,) = read_shards(tmp_path, "held_out")
    with safe_open(tmp_path / "held_out-00000.safetensors", "pt") as file:
        others = {"ids", "positions", "sequences", "cos", "sin"}
        assert set(file.keys()) == others | {f"{kind}.{layer}" for kind in "kv" for layer in range(2)}
    assert len(shard.keys) == 2


def test_the_index_names_model_geometry_recipe_and_shards(model, sequences, tmp_path):
    write_dump(model, CARD, sequences, how(3), tmp_path)
    index = read_index(tmp_path)
    assert index["identity"] == {
        key: CARD[key] for key in ("model", "origin", "config_sha256", "tokenizer_sha256", "weights_id")
    }
    assert index["geometry"] == {"layers": 2, "kv_heads": 2, "head_dim": 8}
    assert index["calibration"] == how(3)
    assert [(shard["side"], shard["sequences"]) for shard in index["shards"]] == [
        ("fit", SHARD_SEQUENCES),
        ("fit", 3),
        ("held_out", 5),
    ]


def written_shards(monkeypatch, fail_after=None):
    """Note the shards that are computed; die before the one after `fail_after`."""
    names, real = [], dump._write_shard

    def write(model, ids, first, stride, path, *rest):
        if fail_after is not None and len(names) == fail_after:
            raise Killed
        names.append(path.name)
        real(model, ids, first, stride, path, *rest)

    monkeypatch.setattr(dump, "_write_shard", write)
    return names


@pytest.mark.parametrize("row_weights", [False, True])
@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_killed_dump_goes_on_and_ends_with_the_same_bytes(done, row_weights, model, sequences, tmp_path, monkeypatch):
    write_dump(model, CARD, sequences, how(), tmp_path / "whole", row_weights=row_weights)
    with monkeypatch.context() as patch:
        written_shards(patch, done)
        with pytest.raises(Killed):
            write_dump(model, CARD, sequences, how(), tmp_path / "cut", row_weights=row_weights)
    assert not (tmp_path / "cut" / INDEX).exists()
    names = written_shards(monkeypatch)
    write_dump(model, CARD, sequences, how(), tmp_path / "cut", row_weights=row_weights)
    assert len(names) == 3 - done
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_dump_killed_while_a_shard_is_written_leaves_no_half_shard(model, sequences, tmp_path, monkeypatch):
    def die(tensors, path, metadata):
        path.write_bytes(b"half")
        raise Killed

    monkeypatch.setattr(marked, "save_file", die)
    with pytest.raises(Killed):
        write_dump(model, CARD, sequences, how(), tmp_path)
    assert contents(tmp_path) == {}


def room(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


@pytest.mark.parametrize("row_weights", [False, True])
def test_a_dump_that_the_disk_has_no_room_for_is_not_begun(row_weights, model, sequences, tmp_path, monkeypatch):
    rows = sum(len(ids) * len(range(0, LENGTH, 3)) for ids in sequences.values())
    needed = rows * (2 * 2 * 2 * 8 * 4 + (2 * 2 * 2 * 4 if row_weights else 0))
    room(monkeypatch, needed - 1)
    with pytest.raises(KvferryError, match="the dump takes"):
        write_dump(model, CARD, sequences, how(3), tmp_path / "dump", row_weights=row_weights)
    assert not (tmp_path / "dump").exists()
    room(monkeypatch, needed)
    write_dump(model, CARD, sequences, how(3), tmp_path / "dump", row_weights=row_weights)
    room(monkeypatch, 0)
    write_dump(model, CARD, sequences, how(3), tmp_path / "dump", row_weights=row_weights)


def test_a_finished_dump_is_not_computed_again(model, sequences, tmp_path, monkeypatch):
    write_dump(model, CARD, sequences, how(), tmp_path)
    names = written_shards(monkeypatch)
    write_dump(model, CARD, sequences, how(), tmp_path)
    assert names == []


@pytest.mark.parametrize("what", ["weights", "stride", "dtype", "tokens", "broken file", "flipped bit", "row weights"])
def test_shards_of_another_dump_are_computed_again(what, tiny_model, model, sequences, tmp_path, monkeypatch):
    write_dump(model, CARD, sequences, how(), tmp_path)
    names, card, stride, ids = written_shards(monkeypatch), CARD, 1, dict(sequences)
    if what == "weights":
        card = CARD | {"weights_id": "other"}
    elif what == "stride":
        stride = 2
    elif what == "dtype":
        model = tiny_model("qwen3", 2).bfloat16()
    elif what == "tokens":
        ids["fit"] = ids["fit"].clone()
        ids["fit"][-1, -1] = 5 if ids["fit"][-1, -1] != 5 else 6
    elif what == "broken file":
        (tmp_path / "fit-00001.safetensors").write_bytes(b"broken")
    elif what == "flipped bit":
        flip_a_byte(tmp_path / "fit-00001.safetensors")
    weighted = what == "row weights"
    write_dump(model, card, ids, how(stride), tmp_path, row_weights=weighted)
    everything = ["fit-00000.safetensors", "fit-00001.safetensors", "held_out-00000.safetensors"]
    assert names == (everything[1:2] if what in ("tokens", "broken file", "flipped bit") else everything)
    fresh = tmp_path / "fresh"
    write_dump(model, card, ids, how(stride), fresh, row_weights=weighted)
    assert contents(fresh).items() <= {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}.items()


@pytest.mark.parametrize("place", [0, 100, -1])
def test_an_altered_shard_is_refused_on_reading(place, model, sequences, tmp_path):
    write_dump(model, CARD, sequences, how(), tmp_path)
    path = tmp_path / "fit-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    shards = read_shards(tmp_path, "fit")
    next(shards)
    with pytest.raises(KvferryError, match=r"fit-00001.safetensors: missing or altered"):
        next(shards)
    assert len(list(read_shards(tmp_path, "held_out"))) == 1


def test_a_missing_shard_or_index_is_refused(model, sequences, tmp_path):
    write_dump(model, CARD, sequences, how(), tmp_path)
    (tmp_path / "held_out-00000.safetensors").unlink()
    with pytest.raises(KvferryError, match=r"held_out-00000.safetensors: missing"):
        list(read_shards(tmp_path, "held_out"))
    (tmp_path / INDEX).unlink()
    with pytest.raises(KvferryError, match="dump index"):
        read_index(tmp_path)


def test_a_key_that_is_not_finite_is_refused_with_layer_and_sequences(tiny_model, sequences, tmp_path):
    """The broken token stands in the second shard only, so that the look at a few tokens before does not meet it."""
    model, ids = tiny_model("llama", 2), sequences["fit"].clone()
    ids[ids == 99] = 98
    ids[SHARD_SEQUENCES + 1, 7] = 99
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = torch.nan
    with pytest.raises(
        KvferryError, match=r"fit-00001: layer 0 gave a key that .* in sequence 9, at token 7 \(id 99\)"
    ):
        write_dump(model, CARD, {"fit": ids}, how(), tmp_path)
    assert list(contents(tmp_path)) == ["fit-00000.safetensors"]


@pytest.mark.parametrize("layer", [0, 1])
def test_values_that_are_not_finite_are_refused_with_layer_and_sequences(layer, tiny_model, sequences, tmp_path):
    model = tiny_model("llama", 2)
    with torch.no_grad():
        model.model.layers[layer].self_attn.v_proj.weight[3, 3] = torch.nan
    with pytest.raises(KvferryError, match=f"layer {layer} gave a value that is not finite in sequence 0, at token 0"):
        write_dump(model, CARD, sequences, how(), tmp_path)


def test_weights_that_are_not_finite_are_refused(sequences, tiny_model, tmp_path):
    """Queries so large that their squares leave float32, while scores do not: a softmax that still has a meaning."""
    model = tiny_model("llama", 2)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight *= 1e20
        model.model.layers[1].self_attn.k_proj.weight *= 1e-20
    with pytest.raises(KvferryError, match="layer 1 gave a weight of a key that is not finite in sequence 0"):
        write_dump(model, CARD, sequences, how(), tmp_path, row_weights=True)


def test_a_model_with_another_rotary_layout_is_not_dumped(tiny_model, sequences, tmp_path):
    with pytest.raises(KvferryError, match="rotary layout"):
        write_dump(tiny_model("interleaved", 2), CARD, sequences, how(), tmp_path / "dump")
    assert not (tmp_path / "dump").exists()


def test_fewer_sequences_are_the_first_shards_of_more(model, sequences, tmp_path):
    write_dump(model, CARD, {"fit": sequences["fit"]}, how(), tmp_path / "more")
    write_dump(model, CARD, {"fit": sequences["fit"][:SHARD_SEQUENCES]}, how(), tmp_path / "fewer")
    more, fewer = (read_json(tmp_path / name / INDEX)["shards"] for name in ("more", "fewer"))
    assert fewer == more[:1]
    assert contents(tmp_path / "fewer")["fit-00000.safetensors"] == contents(tmp_path / "more")["fit-00000.safetensors"]


def test_sequences_longer_than_the_models_positions_are_refused_before_anything_is_read(model, tmp_path):
    most = model.config.max_position_embeddings
    with pytest.raises(
        KvferryError, match=rf"calibration\.length: {most + 1:,} tokens are more than the {most:,} positions"
    ):
        write_dump(model, CARD, {"fit": torch.ones(1, most + 1, dtype=torch.long)}, how(), tmp_path)
    assert list(tmp_path.iterdir()) == []
