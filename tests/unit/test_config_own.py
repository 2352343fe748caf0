"""Models, texts and pairs that a config brings itself: known beside those of the registries, and refused with their own place."""

import shutil
from pathlib import Path

import pytest

from kvferry.config import load_project, read_yaml
from kvferry.errors import KvferryError

ROOT = Path(__file__).parents[2]
FILE = "config/mine.yaml"
HUB = {"kind": "hub", "repository": "owner/small", "geometry": {"layers": 12, "kv_heads": 2, "head_dim": 64}}
CUT = {"kind": "pruned", "base": "small", "remove": [[2, 4]], "calibration": {"corpus": "qasper"}}
OWN = {
    "models": {"small": HUB, "cut": CUT},
    "corpora": {"notes": {"kind": "local", "path": "notes.txt"}},
    "pairs": {"mine": {"source": "small", "target": "smollm2-135m"}},
}


@pytest.fixture
def workplace(tmp_path):
    shutil.copytree(ROOT / "config", tmp_path / "config")
    (tmp_path / "notes.txt").write_text("A note.")
    return tmp_path


def load(root, own, **changes):
    """The smallest config with these entries of its own."""
    config = {
        "pairs": ["mine"],
        "own": own,
        "calibration": {"corpus": "notes"},
        "variants": {"ridge_k8": {"method": "ridge", "k": 8, "lambda": 0.01}},
        "headline": "ridge_k8",
        "evaluation": {"benchmarks": {"hellaswag": {}}},
        "perplexity": {"corpus": "qasper"},
    }
    return load_project(config | changes, FILE, ROOT / "workflow/schemas", root)


def changed(registry, name, entry):
    return OWN | {registry: OWN[registry] | {name: entry}}


def test_own_entries_are_known_beside_those_of_the_registries(workplace):
    project = load(workplace, OWN)
    shipped = read_yaml(ROOT / "config/models.yaml")["models"].keys()
    assert project.models.keys() == shipped | {"small", "cut"}
    assert project.models["small"]["revision"] == "unpinned"  # defaults are filled in as in a registry
    assert project.pair("mine") == OWN["pairs"]["mine"] | {"paper": None}
    assert project.geometry("cut").layers == 10
    assert project.corpora["notes"]["field"] == "text"


def test_a_config_without_entries_of_its_own_has_the_registries_alone(workplace):
    project = load(workplace, {}, pairs=["24l-to-30l"], calibration={"corpus": "qasper"})
    assert project.models.keys() == read_yaml(ROOT / "config/models.yaml")["models"].keys()


def test_k_beyond_the_layers_of_an_own_model_is_refused(workplace):
    with pytest.raises(
        KvferryError, match=r"mine\.yaml: variants\.ridge_k8\.k: 8 is more than the 4 layers of 'small'"
    ):
        load(workplace, changed("models", "small", HUB | {"geometry": HUB["geometry"] | {"layers": 4}}))


WRONG = [
    (changed("models", "small", {"kind": "hub"}), ["models.small.repository", "missing"]),
    (changed("models", "small", HUB | {"dtype": "x"}), ["models.small.dtype", "unknown key"]),
    (changed("models", "qwen3-8b", HUB), ["models.qwen3-8b", "also in", "config/models.yaml", "rename"]),
    (changed("models", "cut", CUT | {"base": "smal"}), ["models.cut.base", "'smal'", "'small'"]),
    (changed("models", "cut", CUT | {"remove": [[2, 13]]}), ["models.cut.remove[0]", "beyond the 12 layers"]),
    (changed("models", "cut", CUT | {"remove": [[2, 4], [3, 5]]}), ["models.cut.remove", "overlaps"]),
    (changed("models", "cut", CUT | {"base": "cut"}), ["models.cut.base", "circle"]),
    (changed("models", "small", {"kind": "local", "path": "absent"}), ["models.small.path", "'absent'"]),
    (changed("models", "small", {"kind": "wheel", "wheel": "w", "member": "a.gguf"}), ["models.small.wheel", "'w'"]),
    (changed("pairs", "mine", {"source": "smal", "target": "small"}), ["pairs.mine.source", "'smal'"]),
    (changed("pairs", "mine", {"source": "small"}), ["pairs.mine.target", "missing"]),
    (changed("corpora", "notes", {"kind": "local", "path": "absent.txt"}), ["corpora.notes.path", "'absent.txt'"]),
    (OWN | {"models": {}}, ["models", "empty"]),
]


@pytest.mark.parametrize(
    ("own", "words"), WRONG, ids=lambda part: " ".join(part)[:40] if isinstance(part, list) else ""
)
def test_what_is_wrong_is_said_to_be_in_the_config(workplace, own, words):
    with pytest.raises(KvferryError) as caught:
        load(workplace, own)
    message = str(caught.value)
    assert message.startswith(f"{FILE}: own: ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("own", "words"), [({"model": {}}, ["own.model", "'models'"]), ({"pairs": [1]}, ["own.pairs", "not a mapping"])]
)
def test_own_holds_three_registries_and_nothing_else(workplace, own, words):
    with pytest.raises(KvferryError) as caught:
        load(workplace, own)
    assert str(caught.value).startswith(f"{FILE}: ")
    for word in words:
        assert word in str(caught.value)
