"""Whatever is damaged, swapped or edited in a finished project is refused by the job that reads it: in one sentence that names
the file and says what to do. What a job can make again it makes again, with the same numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import CORPUS, HEADLINE, MLP, MOMENTS, PAIR, RESULTS, SELECTION, SOURCE, TARGET, WHEEL, mapper_of

from kvferry.errors import KvferryError
from kvferry.files import read_json, read_sealed, sha256_file, write_sealed
from kvferry.fit.artifact import checkpoint_of
from kvferry.fit.pair import Extent, accumulate, save_moments
from kvferry.fit.selection import write_selection
from kvferry.kv.dump import INDEX
from kvferry.kv.mapper import MANIFEST, WEIGHTS
from kvferry.prepare.models import CARD, load_model
from kvferry.records import read_record

Damage = Callable[[Path], None]
DUMP, OTHER_DUMP = tiny.dump_of(SOURCE), tiny.dump_of(TARGET)
INDEX_FILE, SHARD = DUMP / INDEX, DUMP / "fit-00001.safetensors"
CARD_FILE, OTHER_CARD = (tiny.model_of(name) / CARD for name in (SOURCE, TARGET))
MODEL = Path(SOURCE) / "model.safetensors"
MANIFEST_FILE, WEIGHTS_FILE = (mapper_of(HEADLINE) / name for name in (MANIFEST, WEIGHTS))
RECORD = RESULTS / "records" / "pairs" / PAIR / HEADLINE / "winogrande.json"
FACTS = MOMENTS.with_suffix(".json")
REMEDIES = (
    "run again",
    "run again to fetch it",
    "fit it again",
    "fit the mapper again",
    "run its evaluation first",
    "restore it",
)
REMEDIES += ("fetch it again", "delete it, run again", "choose models of one family", "correct the entry")


@pytest.fixture(scope="module")
def finished(tiny_project, tmp_path_factory):
    """A project that has been run to its end."""
    place = shutil.copytree(tiny_project, tmp_path_factory.mktemp("finished") / "project")
    before = Path.cwd()
    try:
        tiny.run(place)
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def project(finished, tmp_path, monkeypatch):
    """A copy of it as the working directory."""
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / "project"))
    # The cards of models that lie elsewhere say where: those of the copy are to be read.
    for name in tiny.LAYERS:
        reseal(tiny.model_of(name) / CARD, lambda card, name=name: card | {"location": str(Path(name).resolve())})


def again(*jobs: str) -> None:
    for job in jobs:
        tiny.JOBS[job](tiny.read_project())


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def listed(path: Path) -> None:
    """JSON, but no object."""
    path.write_text("[]")


def copied(other: Path) -> Damage:
    """Another file in its place."""
    return lambda path: path.write_bytes(other.read_bytes())


def edited(**changes: object) -> Damage:
    """What an editor leaves: values changed, and nothing else."""
    return lambda path: path.write_text(json.dumps(read_json(path) | changes))


def reseal(path: Path, change: Callable[[dict], dict]) -> None:
    """What a careless tool leaves: values changed, with a seal that is right."""
    write_sealed(path, change(read_sealed(path, path.name)))


def resealed(change: Callable[[dict], dict]) -> Damage:
    return lambda path: reseal(path, change)


def rescored(path: Path) -> None:
    """A record whose answers were changed, with the value that follows."""
    record = read_json(path)
    for item in record["items"]:
        item["score"] = 1.0
    path.write_text(json.dumps(record | {"value": 1.0}))


def rewritten(**changes: object) -> Damage:
    """A record of another run, as that would have written it."""

    def damage(path: Path) -> None:
        record = read_record(path)
        replace(record, settings=record.settings | changes).write(path)

    return damage


def tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Other tensors in a mapper, with checksums that are right."""

    def damage(path: Path) -> None:
        save_file({name: change(tensor).contiguous() for name, tensor in load_file(path).items()}, path)
        reseal(path.with_name(MANIFEST), lambda manifest: manifest | {"weights_sha256": sha256_file(path)})

    return damage


def swapped(path: Path) -> None:
    """Two shards of a dump in each other's place."""
    other = path.with_name("fit-00000.safetensors")
    mine = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def reordered(path: Path) -> None:
    index = read_json(path)
    path.write_text(json.dumps(index | {"shards": index["shards"][::-1]}))


def redumped(path: Path) -> None:
    """A dump of other sequences of the same text."""
    shutil.rmtree(path.parent)
    config = yaml.safe_load(Path(tiny.CONFIG).read_text())
    config["calibration"]["seed"] = 1
    Path(tiny.CONFIG).write_text(yaml.safe_dump(config))
    again("dump")
    copy = Path("other")
    shutil.move(path.parent, copy)
    Path(tiny.CONFIG).write_text(yaml.safe_dump(config | {"calibration": tiny.SETTINGS["calibration"]}))
    again("dump")
    shutil.rmtree(path.parent)
    shutil.move(copy, path.parent)


def of_another_pair(path: Path) -> None:
    """Moments or a ranking of the same shapes, but of the target with itself."""
    moments = accumulate(OTHER_DUMP, OTHER_DUMP, Extent(64, 4, "all", 3000))
    if path == SELECTION:
        write_selection(path, read_json(path)["ranked"], moments.origin)
    else:
        save_moments(moments, path)


def with_config(change: Callable[[dict], None]) -> Damage:
    """The config is another one than that of the results."""

    def damage(_: Path) -> None:
        config = yaml.safe_load(Path(tiny.CONFIG).read_text())
        change(config)
        Path(tiny.CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))

    return damage


def with_another_tokenizer(path: Path) -> None:
    """Two tokens of the vocabulary change places."""
    rules = read_json(path)
    vocabulary = rules["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(rules))


def prepared_with_another_tokenizer(path: Path) -> None:
    """The registry's model changes, and its card is made anew, as it should be."""
    with_another_tokenizer(path)
    again("prepare")


def dumped_with_another_tokenizer(path: Path) -> None:
    prepared_with_another_tokenizer(path)
    shutil.rmtree(DUMP)
    again("dump")


def unanswered(damage: Damage) -> Damage:
    """With all records to be made again, so that mappers and benchmarks are read."""

    def whole(path: Path) -> None:
        damage(path)
        shutil.rmtree(RESULTS / "records")

    return whole


def merge(role: str, **changes: str) -> Callable[[dict], dict]:
    return lambda manifest: manifest | {role: manifest[role] | changes}


# What is damaged, how, the job that reads it, and what its message says beside the name of the file.
CASES = {
    "a card that is cut": (CARD_FILE, cut, "dump", ["unreadable model card"]),
    "a card that is empty": (CARD_FILE, empty, "dump", ["unreadable model card"]),
    "a card that is missing": (CARD_FILE, remove, "dump", ["unreadable model card"]),
    "a card that is a list": (CARD_FILE, listed, "dump", ["not a model card but list"]),
    "a card with other layers": (CARD_FILE, edited(layers=1), "dump", ["changed since it was written"]),
    "a card without a key": (CARD_FILE, resealed(lambda card: {"model": SOURCE}), "dump", ["lacks kind"]),
    "the card of another model": (CARD_FILE, copied(OTHER_CARD), "dump", ["is the card of large"]),
    "a card that was changed, for tables": (CARD_FILE, edited(parameters=1), "tables", ["changed since"]),
    "the card of another model, for tables": (CARD_FILE, copied(OTHER_CARD), "tables", ["'large'", "'small'"]),
    "weights with a flipped bit": (MODEL, flip, "dump", ["its weights changed"]),
    "weights that are cut": (MODEL, cut, "dump", ["its weights changed"]),
    "weights that are empty": (MODEL, empty, "dump", ["its weights changed"]),
    "weights of another model": (MODEL, copied(Path(TARGET) / "model.safetensors"), "dump", ["its weights changed"]),
    "another config of a model": (
        MODEL.with_name("config.json"),
        edited(rms_norm_eps=0.1),
        "dump",
        ["its config changed"],
    ),
    "a config of a model that is cut": (MODEL.with_name("config.json"), cut, "dump", ["unreadable config.json"]),
    "another tokenizer": (MODEL.with_name("tokenizer.json"), with_another_tokenizer, "dump", ["its tokenizer changed"]),
    "a tokenizer that is cut": (MODEL.with_name("tokenizer.json"), cut, "dump", ["cannot be loaded"]),
    "a tokenizer that is empty": (MODEL.with_name("tokenizer.json"), empty, "dump", ["cannot be loaded"]),
    "a corpus that is cut": (CORPUS, cut, "dump", ["not a prepared corpus"]),
    "a corpus that is empty": (CORPUS, empty, "dump", ["not a prepared corpus"]),
    "a corpus without its last lines": (
        CORPUS,
        lambda path: path.write_text("".join(path.read_text().splitlines(keepends=True)[:-5])),
        "dump",
        ["not a prepared corpus"],
    ),
    "a corpus with another word": (
        CORPUS,
        lambda path: path.write_text(path.read_text().replace("cat", "cow", 1)),
        "dump",
        ["changed since it was written"],
    ),
    "a shard with a flipped bit": (SHARD, flip, "moments", ["missing or altered"]),
    "a shard that is cut": (SHARD, cut, "moments", ["missing or altered"]),
    "a shard that is empty": (SHARD, empty, "moments", ["missing or altered"]),
    "a shard that is missing": (SHARD, remove, "moments", ["missing or altered"]),
    "shards in each other's place": (SHARD, swapped, "moments", ["missing or altered"]),
    "a shard of another model": (SHARD, copied(OTHER_DUMP / SHARD.name), "moments", ["missing or altered"]),
    "an index that is cut": (INDEX_FILE, cut, "moments", ["unreadable dump index"]),
    "an index that is empty": (INDEX_FILE, empty, "moments", ["unreadable dump index"]),
    "an index that is missing": (INDEX_FILE, remove, "moments", ["unreadable dump index"]),
    "an index with other layers": (
        INDEX_FILE,
        edited(geometry={"layers": 1, "kv_heads": 2, "head_dim": 8}),
        "moments",
        ["changed since it was written"],
    ),
    "an index with shards in another order": (INDEX_FILE, reordered, "moments", ["changed since it was written"]),
    "the index of another model": (INDEX_FILE, copied(OTHER_DUMP / INDEX), "moments", ["missing or altered"]),
    "a dump of other sequences": (INDEX_FILE, redumped, "moments", ["different calibration settings"]),
    "a dump with another tokenizer": (
        MODEL.with_name("tokenizer.json"),
        dumped_with_another_tokenizer,
        "moments",
        ["different tokenizers"],
    ),
    "moments with a flipped bit": (MOMENTS, flip, "fit", ["missing or altered"]),
    "moments that are cut": (MOMENTS, cut, "fit", ["missing or altered"]),
    "moments that are missing": (MOMENTS, remove, "fit", ["missing or altered"]),
    "moments of another pair": (MOMENTS, of_another_pair, "fit", ["not the moments of"]),
    "counts of moments that were changed": (FACTS, edited(rows=1), "fit", ["changed since it was written"]),
    "counts of moments that are cut": (FACTS, cut, "fit", ["unreadable moments"]),
    "a ranking that was changed": (
        SELECTION,
        edited(ranked=[[1, 0], [0, 1], [1, 0]]),
        "fit",
        ["changed since it was written"],
    ),
    "a ranking of another pair": (SELECTION, of_another_pair, "fit", ["another source (large"]),
    "a ranking of layers that are not there": (
        SELECTION,
        resealed(lambda own: own | {"ranked": [[0, 7]] * 3}),
        "fit",
        ["does not rank every source layer"],
    ),
    "a ranking that is cut": (SELECTION, cut, "train", ["unreadable selection"]),
    "a ranking that is missing": (SELECTION, remove, "train", ["unreadable selection"]),
    "a mapper with a flipped bit": (WEIGHTS_FILE, flip, "evaluate_pair", ["truncated or altered"]),
    "a mapper that is cut": (WEIGHTS_FILE, cut, "evaluate_pair", ["truncated or altered"]),
    "a mapper that is missing": (WEIGHTS_FILE, remove, "evaluate_pair", ["missing"]),
    "a mapper of another type": (WEIGHTS_FILE, tensors(torch.Tensor.half), "evaluate_pair", ["types or shapes"]),
    "a mapper of another shape": (WEIGHTS_FILE, tensors(lambda part: part[:-2]), "evaluate_pair", ["types or shapes"]),
    "a mapper of fewer heads": (
        WEIGHTS_FILE,
        tensors(lambda part: part[..., :8]),
        "evaluate_pair",
        ["types or shapes"],
    ),
    "a manifest with another R²": (MANIFEST_FILE, edited(r2={}), "evaluate_pair", ["altered since it was written"]),
    "a manifest that is cut": (MANIFEST_FILE, cut, "evaluate_pair", ["unreadable mapper manifest"]),
    "a manifest of another format": (MANIFEST_FILE, edited(format=1), "evaluate_pair", ["format"]),
    "a manifest of another source": (
        MANIFEST_FILE,
        resealed(merge("source", model="other", weights_id="other")),
        "evaluate_pair",
        ["another source (other"],
    ),
    "a manifest of another tokenizer": (
        MANIFEST_FILE,
        resealed(merge("target", tokenizer_sha256="other")),
        "evaluate_pair",
        ["another target", "tokenizer_sha256"],
    ),
    "a manifest of layers that are not there": (
        MANIFEST_FILE,
        resealed(lambda own: own | {"selected_layers": [[0, 7]] * 3}),
        "evaluate_pair",
        ["types or shapes"],
    ),
    "a manifest that was changed, for tables": (MANIFEST_FILE, edited(rows=1), "tables", ["changed since"]),
    "a manifest of another recipe": (
        MANIFEST_FILE,
        with_config(lambda config: config["variants"][HEADLINE].update({"lambda": 0.5})),
        "tables",
        ["lambda 0.01", "0.5"],
    ),
    "a record that is cut": (RECORD, cut, "tables", ["not an evaluation record"]),
    "a record that is empty": (RECORD, empty, "tables", ["not an evaluation record"]),
    "a record that is missing": (RECORD, remove, "tables", ["missing"]),
    "a record of other answers": (RECORD, rescored, "tables", ["changed since it was written"]),
    "a record of another variant": (
        RECORD,
        copied(RECORD.parents[1] / MLP / RECORD.name),
        "tables",
        ["system 'mlp_k1'"],
    ),
    "a record of another benchmark": (
        RECORD,
        copied(RECORD.with_name("arc_challenge.json")),
        "tables",
        ["'arc_challenge'"],
    ),
    "a record of a model on its own": (
        RECORD,
        copied(RESULTS / "records/native" / TARGET / RECORD.name),
        "tables",
        ["source None"],
    ),
    "a record of another hold-back": (RECORD, rewritten(hold_back=3), "tables", ["hold_back 3"]),
    "a record of another prefix": (
        RECORD.with_name("next_token_kl.json"),
        rewritten(prefix=4),
        "tables",
        ["prefix 4"],
    ),
    "a wheel with a flipped bit": (WHEEL, unanswered(flip), "evaluate_pair", ["sha256"]),
    "a wheel that is cut": (WHEEL, unanswered(cut), "evaluate_pair", ["sha256"]),
    "a wheel that is missing": (WHEEL, unanswered(remove), "evaluate_pair", ["missing"]),
    "a registry with a model whose tokenizer changed": (
        MODEL.with_name("tokenizer.json"),
        prepared_with_another_tokenizer,
        "evaluate_pair",
        ["another source", "tokenizer_sha256"],
    ),
}
# Where the message names the folder of the file, or the mapper that no longer fits.
NAMED = {
    MODEL: SOURCE,
    MODEL.with_name("config.json"): SOURCE,
    MODEL.with_name("tokenizer.json"): SOURCE,
    MANIFEST_FILE: str(mapper_of(HEADLINE)),
}
# Where it is found in another file of the dump.
SPECIAL = dict.fromkeys(
    ("the index of another model", "a dump of other sequences", "shards in each other's place"), str(DUMP)
)
# Read only where something is still to be answered.
ON_USE = (WEIGHTS_FILE, MANIFEST_FILE)


def refusal(job: str) -> str:
    with pytest.raises(KvferryError) as caught:
        again(job)
    return str(caught.value)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("name", CASES)
def test_what_was_damaged_is_refused_by_name_with_what_to_do(name):
    path, damage, job, words = CASES[name]
    damage(path)
    if path in ON_USE and job == "evaluate_pair":
        shutil.rmtree(RESULTS / "records" / "pairs")
    message = refusal(job)
    assert "\n" not in message
    assert SPECIAL.get(name, NAMED.get(path, str(path))) in message
    assert any(remedy in message for remedy in REMEDIES), message
    for word in words:
        assert word in message


@pytest.mark.usefixtures("project")
def test_a_mapper_of_another_variant_is_refused_though_it_fits():
    shutil.rmtree(mapper_of(HEADLINE))
    shutil.copytree(mapper_of("ridge_k1"), mapper_of(HEADLINE))
    for job, words in (("evaluate_pair", "is of the mapper ridge_k1"), ("tables", "variant 'ridge_k1'")):
        message = refusal(job)
        assert words in message
        assert str(MANIFEST_FILE) in message


@pytest.mark.usefixtures("project")
def test_a_mapper_of_another_pair_is_refused():
    shutil.copytree(tiny.IDENTITY_MAPPER, mapper_of(HEADLINE), dirs_exist_ok=True)
    reseal(MANIFEST_FILE, lambda manifest: manifest | {"variant": HEADLINE})
    shutil.rmtree(RESULTS / "records" / "pairs")
    assert "fitted for another source (large" in refusal("evaluate_pair")


@pytest.mark.usefixtures("project")
def test_a_dump_of_another_model_gives_mappers_that_are_refused():
    shutil.rmtree(DUMP)
    shutil.copytree(OTHER_DUMP, DUMP)
    again("moments", "fit")
    shutil.rmtree(RESULTS / "records" / "pairs")
    assert "fitted for another source (large" in refusal("evaluate_pair")


@pytest.mark.usefixtures("project")
def test_a_kept_record_that_is_cut_is_refused_and_not_published():
    damaged = next((RECORD.parent / ".kept").glob(f"{RECORD.stem}-*.json"))
    cut(damaged)
    RECORD.unlink()
    message = refusal("evaluate_pair")
    assert f"{damaged}: not an evaluation record" in message
    assert "delete it and run again" in message
    assert not RECORD.exists()


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("damage", [flip, cut, empty, remove])
def test_a_shard_of_an_unfinished_dump_is_made_again(damage):
    whole = SHARD.read_bytes()
    INDEX_FILE.unlink()
    damage(SHARD)
    again("dump")
    assert SHARD.read_bytes() == whole


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("damage", [flip, cut, empty, remove])
def test_a_finished_layer_of_an_unfinished_mlp_is_trained_again(damage, monkeypatch):
    weights = mapper_of(MLP) / WEIGHTS
    whole = weights.read_bytes()
    monkeypatch.setattr("kvferry.fit.artifact.shutil.rmtree", lambda *_, **__: None)
    shutil.move(mapper_of(MLP), "older")
    again("train")
    checkpoint = checkpoint_of(mapper_of(MLP))
    damage(next(checkpoint.glob("v.1.*")))
    again("train")
    assert weights.read_bytes() == whole


@pytest.mark.usefixtures("project")
def test_an_undamaged_project_is_read_by_every_job():
    before = {path: path.read_bytes() for path in sorted((RESULTS / "tables").iterdir())}
    again(*tiny.JOBS)
    assert {path: path.read_bytes() for path in sorted((RESULTS / "tables").iterdir())} == before
    assert load_model(tiny.model_of(SOURCE)).card["model"] == SOURCE
