"""The mapper computes what its formula says, and its artifact is refused when altered or made for others."""

import csv
import json
from pathlib import Path

import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.files import fingerprint
from kvferry.kv import mapper as module
from kvferry.kv.handoff import Span
from kvferry.kv.mapper import (
    FORMAT,
    KINDS,
    MANIFEST,
    ROPES,
    WEIGHTS,
    Affine,
    HeadLocal,
    Mapper,
    Network,
    flatten,
    load_mapper,
    save_mapper,
)
from kvferry.kv.rope import Rotation, rotation

EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
IDENTITY = ("config_sha256", "tokenizer_sha256", "weights_id")
TABLE12 = Path(__file__).parents[2] / "resources/paper/table12.csv"
# KV heads are 8 of 128 in all of these; layers as in the models' configs on the hub.
LAYERS = {
    "Qwen3 8B→32B": 64,
    "Qwen3 14B→32B": 64,
    "Llama 3.1 8B→70B": 80,
    "Ministral 3 3B→8B": 34,
    "Ministral 3 8B→14B": 40,
    "Ministral 3 3B→14B": 40,
}
# Largest error of a bfloat16 mapper, relative to the largest number: 8 bits a number, and sums of some dozen of them.
BFLOAT16 = 0.03
SOURCE, TARGET = (
    {"model": role, **{key: f"{key} of {role}" for key in IDENTITY}, "layers": 5} for role in ("source", "target")
)


def random_mapper(layers=4, k=2, source_width=16, heads=3, head_dim=4, source_layers=5, dtype=torch.float32):
    torch.manual_seed(3)
    selected = [torch.randperm(source_layers)[:k].tolist() for _ in range(layers)]
    width = heads * head_dim

    def affines():
        return [Affine(torch.randn(k * source_width, width).to(dtype), torch.randn(width).to(dtype)) for _ in selected]

    return Mapper(selected, affines(), affines(), heads)


def random_map(kind, k, source_dim=8, heads=2, head_dim=8, width=5, source_heads=2):
    """A map of one layer of some kind, between layers with as many heads."""
    numbers = k * source_heads * source_dim
    if kind == "affine":
        return Affine(torch.randn(numbers, heads * head_dim), torch.randn(heads * head_dim))
    if kind == "head_local":
        return HeadLocal(torch.randn(heads, k * source_dim, head_dim), torch.randn(heads * head_dim))
    inner = (torch.randn(numbers, heads * width), torch.randn(heads * width))
    outer = (torch.randn(heads, width, width), torch.randn(heads, width), torch.randn(heads, width, head_dim))
    return Network(*inner, *outer, torch.randn(heads, head_dim))


def mapper_of(kind, rope="stripped", selected=((3, 0, 4), (1, 2, 0), (4, 3, 1))):
    """A mapper of some kind for `tiny_model("llama", 5)` on both sides."""
    torch.manual_seed(11)
    keys, values = ([random_map(kind, len(chosen)) for chosen in selected] for _ in range(2))
    return Mapper([list(chosen) for chosen in selected], keys, values, 2, rope)


def random_layers(batch, tokens, layers=5, heads=2, dim=8, seed=6):
    torch.manual_seed(seed)
    return [tuple(torch.randn(2, batch, heads, tokens, dim).unbind()) for _ in range(layers)]


def written_out(own, heads):
    """A map of one token in float64, number by number: `heads` is a list of source heads a source layer."""
    fields = {name: tensor.double() for name, tensor in own.tensors().items()}
    every = [number for layer in heads for head in layer for number in head.double()]
    if isinstance(own, Affine):
        return [
            bias + sum(x * w for x, w in zip(every, column, strict=True))
            for column, bias in zip(fields["weight"].T, fields["bias"], strict=True)
        ]
    out = []
    for head in range(len(heads[0])):
        if isinstance(own, HeadLocal):
            x = [number for layer in heads for number in layer[head].double()]
            steps = [(fields["weight"][head], fields["bias"].view(len(heads[0]), -1)[head])]
        else:
            x, width = every, fields["second"].shape[1]
            mine = slice(head * width, (head + 1) * width)
            steps = [(fields["first"][:, mine], fields["first_bias"][mine])]
            steps += [(fields[name][head], fields[f"{name}_bias"][head]) for name in ("second", "third")]
        for number, (weight, bias) in enumerate(steps):
            x = [
                b + sum(v * w for v, w in zip(x, column, strict=True)) for column, b in zip(weight.T, bias, strict=True)
            ]
            x = [v.clamp(min=0) for v in x] if number < len(steps) - 1 else x
        out += x
    return out


@pytest.fixture
def artifact(tmp_path):
    """A saved mapper's folder."""
    folder = tmp_path / "mapper"
    save_mapper(random_mapper(), {"source": SOURCE, "target": TARGET, "recipe": {"k": 2}}, folder)
    return folder


def refusal(folder, source=SOURCE, target=TARGET):
    with pytest.raises(KvferryError) as caught:
        load_mapper(folder, source, target)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edited(folder, **changes):
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def sealed(folder, **changes):
    """As `edited`, with the manifest's own checksum made anew: what a careless tool would leave."""
    manifest = json.loads((folder / MANIFEST).read_text()) | changes
    del manifest["manifest_sha256"]
    return edited(folder, **changes, manifest_sha256=fingerprint(manifest))


@pytest.mark.parametrize("widths", [(4,), (3, 5), (8, 8, 8), (1, 2, 3, 4)])
def test_blocks_are_one_product_with_the_joined_features(widths):
    torch.manual_seed(1)
    parts = [torch.randn(7, width) for width in widths]
    affine = Affine(torch.randn(sum(widths), 6), torch.randn(6))
    torch.testing.assert_close(affine.blocks(parts), torch.cat(parts, 1) @ affine.weight + affine.bias, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_map_of_every_kind_is_its_formula_written_out(kind, k, dtype):
    torch.manual_seed(5)
    own = random_map(kind, k, source_dim=4, heads=3, head_dim=2, source_heads=3).astype(dtype)
    parts = [torch.randn(4, 12).to(dtype) for _ in range(k)]
    found = own.blocks(parts)
    assert found.shape == (4, 6)
    assert found.dtype == own.dtype == dtype
    for token in range(4):
        wanted = torch.stack(written_out(own, [part[token].view(3, 4) for part in parts]))
        error = (found[token].double() - wanted).abs().max() / wanted.abs().max()
        assert error < (1e-6 if dtype == torch.float32 else BFLOAT16)


def test_a_head_local_map_reads_no_other_head():
    own, part = random_map("head_local", 1), torch.randn(3, 16)
    other = part.clone()
    other[:, 8:] = torch.nan
    torch.testing.assert_close(own.blocks([other])[:, :8], own.blocks([part])[:, :8], **EXACT)


def test_features_are_heads_side_by_side_and_tokens_below_each_other():
    part = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    flat = flatten(part, torch.float32)
    assert flat.shape == (8, 15)
    for batch, head, token, dim in ((0, 0, 0, 0), (1, 2, 3, 4), (1, 0, 2, 3), (0, 1, 3, 0)):
        assert int(flat[batch * 4 + token, head * 5 + dim]) == int(part[batch, head, token, dim])


def turned_by(key, position, sign):
    """Rotate one head's key by its position with textbook frequencies, one coordinate pair at a time."""
    half = len(key) // 2
    angle = sign * position * 10000.0 ** (-torch.arange(half).double() / half)
    first, second = key[:half].double(), key[half:].double()
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()))


def test_a_mapped_token_is_the_formula_of_the_paper_even_between_other_numbers_of_heads(tiny_model):
    """Source of 2 KV heads of 8, target of 3 of 4: strip, join, multiply, rotate, written out token by token."""
    mapper = random_mapper()
    source, target = tiny_model("llama", 5), tiny_model("llama", 4, heads=6, kv_heads=3, head_dim=4)
    torch.manual_seed(8)
    layers = [(torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)) for _ in range(5)]
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [30, 31, 32, 33, 34, 35]])
    mapped = mapper.translate(layers, rotation(source, positions), rotation(target, positions))
    assert [keys.shape for keys, _ in mapped] == [(2, 3, 6, 4)] * 4
    for number, chosen in enumerate(mapper.selected):
        for row, token in ((0, 0), (0, 5), (1, 0), (1, 3)):
            place = int(positions[row, token])
            plain = [turned_by(layers[n][0][row, head, token], place, -1) for n in chosen for head in range(2)]
            value = torch.cat([layers[n][1][row, head, token] for n in chosen for head in range(2)])
            to_key, to_value = mapper.keys[number], mapper.values[number]
            key = torch.cat(plain) @ to_key.weight.double() + to_key.bias
            for head in range(3):
                own = slice(4 * head, 4 * head + 4)
                wanted = turned_by(key[own], place, 1).float()
                torch.testing.assert_close(mapped[number][0][row, head, token], wanted, rtol=1e-4, atol=1e-4)
                wanted = (value @ to_value.weight + to_value.bias)[own]
                torch.testing.assert_close(mapped[number][1][row, head, token], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_mapped_alike_whatever_stands_around_it(kind, rope, tiny_model):
    mapper, model = mapper_of(kind, rope), tiny_model("llama", 5)
    layers = random_layers(1, 30)
    positions = torch.arange(40, 70)[None]
    whole = mapper.translate(layers, rotation(model, positions), rotation(model, positions))
    for first, end in ((0, 1), (4, 11), (29, 30)):
        part = [(keys[:, :, first:end], values[:, :, first:end]) for keys, values in layers]
        table = rotation(model, positions[:, first:end])
        for pair, wanted in zip(mapper.translate(part, table, table), whole, strict=True):
            for found, own in zip(pair, wanted, strict=True):
                torch.testing.assert_close(found, own[:, :, first:end], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_padded_batch_are_mapped_as_each_alone_at_its_own_offset(kind, dtype, tiny_model):
    """Three prompts of different lengths after different numbers of earlier tokens."""
    mapper, model = mapper_of(kind).astype(dtype), tiny_model("llama", 5)
    rows, before = [[1] * 9, [1] * 4, [1]], torch.tensor([0, 100, 7])
    span = Span.of(rows, torch.device("cpu"))
    layers = random_layers(3, 9)
    table = rotation(model, span.positions(before))
    together = mapper.translate(layers, table, table)
    for row, length in enumerate(map(len, rows)):
        alone = [tuple(part[row : row + 1, :, :length] for part in pair) for pair in layers]
        table = rotation(model, torch.arange(length)[None] + before[row])
        for pair, wanted in zip(together, mapper.translate(alone, table, table), strict=True):
            for found, own in zip(pair, wanted, strict=True):
                assert found.dtype == dtype
                torch.testing.assert_close(found[row : row + 1, :, :length], own, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_a_span_may_be_mapped_a_few_rows_at_a_time(kind, batch, tiny_model, monkeypatch):
    mapper, model, layers = mapper_of(kind), tiny_model("llama", 5), random_layers(batch, 17)
    table = rotation(model, torch.arange(17).expand(batch, -1))
    wanted = mapper.translate(layers, table, table)
    for rows in (1, 6, 11, 17 * batch - 1):
        monkeypatch.setattr(module, "CPU_ROWS", rows)
        for pair, own in zip(mapper.translate(layers, table, table), wanted, strict=True):
            torch.testing.assert_close(pair, own, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rope_field_says_which_rotations_are_taken_off_and_put_on(kind, tiny_model):
    source, target = tiny_model("llama", 5), tiny_model("yarn", 5)
    positions = torch.tensor([[3, 4, 5, 6], [90, 91, 92, 93]])
    mappers = {rope: mapper_of(kind, rope) for rope in ROPES}
    layers, tables = random_layers(2, 4), (rotation(source, positions), rotation(target, positions))
    mapped = {rope: mapper.translate(layers, *tables) for rope, mapper in mappers.items()}
    plain = [(tables[0].for_heads().strip(keys), values) for keys, values in layers]
    for number, chosen in enumerate(mappers["stripped"].selected):
        to_key = mappers["stripped"].keys[number]
        content, raw = (
            to_key.blocks([flatten(of[layer][0], torch.float32) for layer in chosen]).view(2, 4, 2, 8).transpose(1, 2)
            for of in (plain, layers)
        )
        wanted = {"stripped": tables[1].for_heads().apply(content), "not_reapplied": content, "coupled": raw}
        for rope in ROPES:
            torch.testing.assert_close(mapped[rope][number][0], wanted[rope], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mapped[rope][number][1], mapped["stripped"][number][1], **EXACT)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mapper_in_bfloat16_stays_near_the_one_in_float32(kind, rope, tiny_model):
    mapper, model, layers = mapper_of(kind, rope), tiny_model("llama", 5), random_layers(2, 6)
    table = rotation(model, torch.arange(200, 206).expand(2, -1))
    half = mapper.astype(torch.bfloat16)
    assert (half.dtype, half.rope, half.parameters) == (torch.bfloat16, rope, mapper.parameters)
    for pair, wanted in zip(half.translate(layers, table, table), mapper.translate(layers, table, table), strict=True):
        for found, own in zip(pair, wanted, strict=True):
            assert found.dtype == torch.bfloat16
            assert (found - own).abs().max() / own.abs().max() < BFLOAT16


def test_sums_in_bfloat16_are_rounded_once_not_at_every_layer():
    """256 + 1 is no bfloat16: eight layers that add 1 would be lost one by one."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    affine = Affine(torch.ones(9, 1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16))
    assert affine.blocks([256 * one, *[one] * 8]).item() == 264


def test_source_layers_that_no_target_layer_reads_may_be_anything(tiny_model):
    mapper = Mapper([[3], [1]], random_mapper(2, 1).keys, random_mapper(2, 1).values, 3)
    table = rotation(tiny_model("llama"), Span.of([[1] * 6], torch.device("cpu")).positions(torch.zeros(1).long()))
    small = Rotation(table.cos[..., :4], table.sin[..., :4])
    torch.manual_seed(4)
    layers = [(torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)) for _ in range(5)]
    broken = [pair if n in (1, 3) else tuple(part * torch.nan for part in pair) for n, pair in enumerate(layers)]
    for pair, wanted in zip(
        mapper.translate(broken, table, small), mapper.translate(layers, table, small), strict=True
    ):
        torch.testing.assert_close(pair, wanted, **EXACT)


@pytest.mark.parametrize(
    ("layers", "k", "source_heads", "source_dim", "heads", "dim"),
    [(4, 2, 2, 8, 3, 4), (1, 1, 1, 2, 1, 2), (6, 5, 4, 4, 2, 16)],
)
def test_parameters_are_counted_as_the_paper_counts_them(layers, k, source_heads, source_dim, heads, dim):
    mapper = random_mapper(layers, k, source_heads * source_dim, heads, dim)
    assert mapper.parameters == 2 * layers * heads * (k * source_heads * source_dim) * dim


@pytest.mark.parametrize(("kind", "numbers"), [("head_local", 2 * 24 * 8), ("network", 48 * 10 + 2 * (5 * 5 + 5 * 8))])
def test_parameters_of_other_kinds_are_their_weights_without_biases(kind, numbers):
    assert mapper_of(kind).parameters == 2 * 3 * numbers


def test_the_papers_pairs_have_the_papers_numbers_of_parameters():
    rows = list(csv.DictReader(TABLE12.open()))
    assert {row["pair"] for row in rows} == set(LAYERS)
    for row in rows:
        layers, k = LAYERS[row["pair"]], int(row["k"])
        affine = Affine(torch.empty(k * 8 * 128, 8 * 128, device="meta"), torch.empty(8 * 128, device="meta"))
        mapper = Mapper([list(range(k))] * layers, [affine] * layers, [affine] * layers, 8)
        assert mapper.parameters == 2 * layers * 8 * (k * 8 * 128) * 128
        assert mapper.parameters == pytest.approx(float(row["parameters"]), abs=0.005e9 + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_mapper_comes_back_bit_by_bit(dtype, tmp_path):
    mapper = random_mapper(dtype=dtype)
    save_mapper(mapper, {"source": SOURCE, "target": TARGET, "recipe": {"k": 2}}, tmp_path / "m")
    loaded, manifest = load_mapper(tmp_path / "m", SOURCE, TARGET)
    assert (loaded.selected, loaded.kv_heads, loaded.dtype) == (mapper.selected, mapper.kv_heads, dtype)
    for found, saved in zip((*loaded.keys, *loaded.values), (*mapper.keys, *mapper.values), strict=True):
        torch.testing.assert_close(found.weight, saved.weight, **EXACT)
        torch.testing.assert_close(found.bias, saved.bias, **EXACT)
    assert manifest["recipe"] == {"k": 2}
    assert manifest["parameters"] == mapper.parameters
    assert manifest["weights_bytes"] == (tmp_path / "m" / WEIGHTS).stat().st_size


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_mapper_of_every_kind_comes_back_with_its_kind_and_rope(kind, rope, tmp_path):
    mapper = mapper_of(kind, rope).astype(torch.bfloat16)
    save_mapper(mapper, {"source": SOURCE, "target": TARGET}, tmp_path / "m")
    loaded, manifest = load_mapper(tmp_path / "m", SOURCE, TARGET)
    assert (manifest["map"], manifest["rope"], manifest["dtype"]) == (kind, rope, "bfloat16")
    assert (loaded.selected, loaded.kv_heads, loaded.rope) == (mapper.selected, mapper.kv_heads, rope)
    for found, saved in zip((*loaded.keys, *loaded.values), (*mapper.keys, *mapper.values), strict=True):
        assert type(found) is KINDS[kind]
        torch.testing.assert_close(found.tensors(), saved.tensors(), **EXACT)


def test_a_mapper_moves_to_another_device_whole():
    mapper = mapper_of("network", "coupled")
    moved = mapper.onto([torch.device("meta")] * len(mapper.keys))
    assert (moved.selected, moved.kv_heads, moved.rope) == (mapper.selected, mapper.kv_heads, mapper.rope)
    assert all(part.is_meta for own in (*moved.keys, *moved.values) for part in own.tensors().values())


def test_a_save_that_fails_leaves_the_older_artifact_as_it_was(artifact, monkeypatch):
    def fail(*_):
        raise RuntimeError("power cut")

    before = {path.name: path.read_bytes() for path in artifact.iterdir()}
    monkeypatch.setattr(module, "write_json", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        save_mapper(random_mapper(k=1), {"source": SOURCE, "target": TARGET}, artifact)
    assert {path.name: path.read_bytes() for path in artifact.iterdir()} == before
    assert [path.name for path in artifact.parent.iterdir()] == [artifact.name]


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("key", IDENTITY)
def test_another_model_or_tokenizer_is_refused_by_name(role, key, artifact):
    cards = {"source": SOURCE, "target": TARGET}
    cards[role] = cards[role] | {"model": "other", key: "something else"}
    message = refusal(artifact, **cards)
    assert f"fitted for another {role}" in message
    assert key in message
    assert "other" in message


def test_source_and_target_the_wrong_way_round_are_refused(artifact):
    assert "another source" in refusal(artifact, TARGET, SOURCE)


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("key", IDENTITY)
def test_a_manifest_that_does_not_say_whom_it_is_for_is_refused(role, key, artifact):
    manifest = json.loads((artifact / MANIFEST).read_text())
    del manifest[role][key]
    assert f"another {role}" in refusal(sealed(artifact, **{role: manifest[role]}))


@pytest.mark.parametrize("place", [0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_in_the_weights_is_refused(place, bit, artifact):
    path = artifact / WEIGHTS
    content = bytearray(path.read_bytes())
    content[round(place * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)
    assert "altered since it was written; fit the mapper again" in refusal(artifact)


@pytest.mark.parametrize("kept", [0, 1, 8, 100, -100, -1])
def test_truncated_weights_are_refused(kept, artifact):
    path = artifact / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    assert "truncated" in refusal(artifact)


def test_lengthened_weights_are_refused(artifact):
    with (artifact / WEIGHTS).open("ab") as file:
        file.write(b"\0")
    assert "altered" in refusal(artifact)


def test_weights_that_are_no_safetensors_are_refused_even_with_their_checksum(artifact):
    path = artifact / WEIGHTS
    path.write_bytes(b"not tensors")
    sealed(artifact, weights_sha256=module.sha256_file(path))
    assert "not a safetensors file" in refusal(artifact)


@pytest.mark.parametrize("name", [WEIGHTS, MANIFEST])
def test_a_missing_file_is_refused_and_named(name, artifact):
    (artifact / name).unlink()
    assert name in refusal(artifact)


def test_a_missing_folder_is_refused(tmp_path):
    assert MANIFEST in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("version", [0, FORMAT + 1, str(FORMAT), None])
def test_another_format_is_refused(version, artifact):
    assert f"format {FORMAT}" in refusal(edited(artifact, format=version))


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[]", "null", "3", '"manifest"'])
def test_a_manifest_that_is_no_json_object_is_refused(text, artifact):
    (artifact / MANIFEST).write_text(text)
    assert MANIFEST in refusal(artifact)


@pytest.mark.parametrize("kept", [0.0, 0.2, 0.5, 0.9])
def test_a_truncated_manifest_is_refused(kept, artifact):
    path = artifact / MANIFEST
    text = path.read_text()
    path.write_text(text[: int(kept * len(text))])
    assert MANIFEST in refusal(artifact)


def test_a_manifest_that_is_not_text_is_refused(artifact):
    (artifact / MANIFEST).write_bytes(b"\xff\xfe\x00")
    assert MANIFEST in refusal(artifact)


@pytest.mark.parametrize("key", ["source", "target", "selected_layers", "kv_heads", "weights_sha256"])
def test_a_manifest_without_a_section_is_refused(key, artifact):
    path = artifact / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest[key]
    path.write_text(json.dumps(manifest))
    assert "\n" not in refusal(artifact)


@pytest.mark.parametrize("change", ["reordered", "one layer fewer", "one target layer fewer"])
def test_a_manifest_whose_layers_were_altered_is_refused(change, artifact):
    """The weights cannot tell: they would be applied to the wrong blocks without a word."""
    selected = json.loads((artifact / MANIFEST).read_text())["selected_layers"]
    altered = {
        "reordered": [chosen[::-1] for chosen in selected],
        "one layer fewer": [chosen[:1] for chosen in selected],
        "one target layer fewer": selected[:-1],
    }[change]
    assert "\n" not in refusal(edited(artifact, selected_layers=altered))


@pytest.mark.parametrize(("key", "value"), [("map", "spline"), ("map", None), ("rope", "twice"), ("rope", None)])
def test_a_kind_of_map_or_rope_that_is_not_known_is_refused_by_name(key, value, artifact):
    message = refusal(sealed(artifact, **{key: value}))
    assert f"{key}: {value}" in message
    assert "fit it again" in message


def test_a_manifest_that_names_another_kind_than_the_weights_are_is_refused(artifact):
    assert "holds no tensor 'k.0.first'" in refusal(sealed(artifact, map="network"))
