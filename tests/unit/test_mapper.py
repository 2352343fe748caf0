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
from kvferry.kv.mapper import FORMAT, MANIFEST, WEIGHTS, Affine, Mapper, flatten, load_mapper, save_mapper
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


def test_features_are_heads_side_by_side_and_tokens_below_each_other():
    part = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    flat = flatten(part, torch.float32)
    assert flat.shape == (8, 15)
    for batch, head, token, dim in ((0, 0, 0, 0), (1, 2, 3, 4), (1, 0, 2, 3), (0, 1, 3, 0)):
        assert int(flat[batch * 4 + token, head * 5 + dim]) == int(part[batch, head, token, dim])


def turned(key, position, sign):
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
            plain = [turned(layers[n][0][row, head, token], place, -1) for n in chosen for head in range(2)]
            value = torch.cat([layers[n][1][row, head, token] for n in chosen for head in range(2)])
            to_key, to_value = mapper.keys[number], mapper.values[number]
            key = torch.cat(plain) @ to_key.weight.double() + to_key.bias
            for head in range(3):
                own = slice(4 * head, 4 * head + 4)
                wanted = turned(key[own], place, 1).float()
                torch.testing.assert_close(mapped[number][0][row, head, token], wanted, rtol=1e-4, atol=1e-4)
                wanted = (value @ to_value.weight + to_value.bias)[own]
                torch.testing.assert_close(mapped[number][1][row, head, token], wanted, rtol=1e-4, atol=1e-4)


def test_a_token_is_mapped_alike_whatever_stands_around_it(tiny_model):
    mapper, model = random_mapper(heads=2, head_dim=8), tiny_model("llama", 5)
    torch.manual_seed(9)
    layers = [(torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)) for _ in range(5)]
    positions = torch.arange(40, 70)[None]
    whole = mapper.translate(layers, rotation(model, positions), rotation(model, positions))
    for first, end in ((0, 1), (4, 11), (29, 30)):
        part = [(keys[:, :, first:end], values[:, :, first:end]) for keys, values in layers]
        table = rotation(model, positions[:, first:end])
        for pair, wanted in zip(mapper.translate(part, table, table), whole, strict=True):
            for found, own in zip(pair, wanted, strict=True):
                torch.testing.assert_close(found, own[:, :, first:end], **CLOSE)


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
