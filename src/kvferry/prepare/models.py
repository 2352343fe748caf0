"""Models: bring each registry entry to a directory that transformers loads, with a card that says what it is.

Kinds: `wheel` (GGUF dequantised once), `pruned` (made from another entry), `hub` (a snapshot at a revision), `local`. A
card carries geometry and identity: hashes of config and tokenizer, and an id of the weights. Does not know pairs.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvferry.devices import SOURCE, TARGET, Place, place_of
from kvferry.errors import KvferryError, first_line
from kvferry.files import directory_whole, fingerprint, read_sealed, sha256_file, write_sealed
from kvferry.prepare.architecture import check_architecture
from kvferry.prepare.decoder import decoder_config, geometry_of, load_decoder, read_config
from kvferry.prepare.hub import check_same_commit, fetch_snapshot
from kvferry.prepare.placement import check_there, device_map, settle
from kvferry.prepare.tokenizer import read_tokenizer, tokenizer_id
from kvferry.prepare.wheels import open_member
from kvferry.progress import BYTES, bar, watched

CARD = "card.json"
# What other stages read of a card.
READ = (
    "model",
    "kind",
    "origin",
    "location",
    "layers",
    "kv_heads",
    "head_dim",
    "config_sha256",
    "tokenizer_sha256",
    "weights_id",
)
VOLATILE = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
CONFIG = "config.json"
BLOBS, SHA256 = "blobs", re.compile(r"[0-9a-f]{64}")


def quiet() -> None:
    """No advice from transformers, and bars only where somebody watches."""
    transformers.utils.logging.set_verbosity_error()
    if not watched():
        transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class Loaded:
    """A model in memory with its tokenizer and card."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    card: dict[str, Any]


def read_card(directory: Path) -> dict[str, Any]:
    """The card of a prepared model, whose directory has its name.

    Raises:
        KvferryError: missing, broken, changed, or another model's.
    """
    card = read_sealed(directory / CARD, "model card", READ)
    if card["model"] != directory.absolute().name:
        raise KvferryError(f"{directory / CARD}: is the card of {card['model']}; delete {directory} and run again")
    return card


def load_model(
    directory: Path, place: Place = "cpu", dtype: str = "float32", card: dict[str, Any] | None = None
) -> Loaded:
    """Load a prepared model for inference.

    place: a device, or GPUs that its layers are spread over. card: of a directory that holds none.

    Raises:
        KvferryError: weights, config or tokenizer are not those of the card, a device is absent, or loading fails.
    """
    quiet()
    check_there(place)
    card = card or read_card(directory)
    location = location_of(directory, card)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location)
        check_unchanged(card, location, tokenizer, directory)
        model = load_decoder(location, getattr(torch, dtype), device_map(location, place)).eval()
        settle(model, place)
        return Loaded(model, tokenizer, card)
    except (OSError, ValueError, SafetensorError) as error:
        prepared = (directory / CARD).is_file()
        remedy = f"delete {directory} and run again" if prepared else "give a whole copy of it"
        raise KvferryError(
            f"{location}: model {card['model']} cannot be loaded ({first_line(error)}); {remedy}"
        ) from error


def load_pair(source: Path, target: Path, compute: Mapping[str, Any]) -> tuple[Loaded, Loaded]:
    """Load both models of a pair, each where the config's section `compute` has it. Raises as `load_model` does."""
    own, other = (
        load_model(directory, place_of(compute, role), compute["dtype"])
        for directory, role in ((source, SOURCE), (target, TARGET))
    )
    return own, other


def location_of(directory: Path, card: dict[str, Any]) -> Path:
    """Where the files of a prepared model lie: beside its card, wherever these were moved to, or else where the card says."""
    return directory if (directory / CONFIG).is_file() else Path(card["location"])


def check_unchanged(card: dict[str, Any], location: Path, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Compare the files at `location`, and the tokenizer that was read there, with the card.

    Raises:
        KvferryError: weights, config or tokenizer differ.
    """
    found = {
        "config": config_id(decoder_config(location).to_dict()) == card["config_sha256"],
        "tokenizer": tokenizer_id(tokenizer) == card["tokenizer_sha256"],
        "weights": weights_id(location) == card["weights_id"],
    }
    for part, same in found.items():
        if not same:
            raise KvferryError(
                f"{location}: its {part} changed since the model was prepared; delete {directory} and run again"
            )


def dequantise(wheel: Path, member: str, directory: Path) -> None:
    """Save the GGUF model inside a wheel as a float32 model directory."""
    # Within the directory, so that what a killed job leaves goes with it.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        file = Path(scratch) / Path(member).name
        with open_member(wheel, member) as packed, file.open("wb") as out:
            shutil.copyfileobj(packed, out)
        config = transformers.GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=file.name, quantization_config=config)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=file.name)
    save_model(model.float(), tokenizer, directory)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Save weights, config and tokenizer, without the name of the folder that they came from.

    Weights get the model's own names, also where it was read out of a larger one.
    """
    model.config.name_or_path = ""
    model.save_pretrained(directory, save_original_format=False)
    tokenizer.save_pretrained(directory)


def check_config(name: str, location: Path) -> None:
    """Refuse what its config.json alone shows to be of no use, before anything large is fetched or read.

    Raises:
        KvferryError: there is none, transformers does not know it, or such a model cannot transfer.
    """
    if not (location / CONFIG).is_file():
        raise KvferryError(f"model {name}: {location} holds no {CONFIG}; give a directory in the hub's layout")
    try:
        config = read_config(location)
    except ValueError as error:
        raise KvferryError(f"model {name}: {location / CONFIG}: {error}; choose another model") from error
    check_architecture(config, f"model {name}")


def make_card(name: str, entry: dict[str, Any], location: Path) -> dict[str, Any]:
    """Geometry and identity of the model at `location`.

    Raises:
        KvferryError: `location` is no model directory, or of a model that cannot transfer.
    """
    check_config(name, location)
    try:
        return _card_facts(name, entry, location)
    except (OSError, ValueError, AttributeError, KeyError, SafetensorError) as error:
        raise KvferryError(
            f"model {name}: {location} is not a decoder model with a fast tokenizer that transformers knows "
            f"({first_line(error)}); this model cannot be used"
        ) from error


def _card_facts(name: str, entry: dict[str, Any], location: Path) -> dict[str, Any]:
    """What `make_card` says."""
    config = decoder_config(location)
    tokenizer = read_tokenizer(location)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    return {
        "model": name,
        "kind": entry["kind"],
        "origin": origin(entry),
        "location": str(location),
        **asdict(geometry_of(config)),
        "query_heads": config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "parameters": parameters,
        "config_sha256": config_id(config.to_dict()),
        "tokenizer_sha256": tokenizer_id(tokenizer),
        "weights_id": weights_id(location),
        "licence": entry.get("licence"),
    }


def origin(entry: dict[str, Any]) -> str:
    """Where an entry's weights come from, in words."""
    return {
        "wheel": lambda: f"{entry['member'].rsplit('/', 1)[-1]} in wheel {entry['wheel']}",
        "pruned": lambda: (
            f"{entry['base']} without layers " + ", ".join(f"{first}-{end - 1}" for first, end in entry["remove"])
        ),
        "hub": lambda: f"{entry['repository']} at {entry['revision']}",
        "local": lambda: f"directory {entry['path']}",
    }[entry["kind"]]()


def config_id(config: dict[str, Any]) -> str:
    """Hash of what a config says about the computation."""
    return fingerprint(
        {key: value for key, value in json.loads(json.dumps(config, default=str)).items() if key not in VOLATILE}
    )


def weights_id(location: Path) -> str:
    """Hash of the checksums of all weight files, the same wherever these lie.

    Raises:
        KvferryError: the folder has none.
    """
    files = sorted(location.glob("*.safetensors"))
    if not files:
        raise KvferryError(f"{location}: no .safetensors weights; give a directory in the hub's layout")
    with bar(sum(file.stat().st_size for file in files), f"check {location.name}", BYTES) as progress:
        return fingerprint([_checksum(file, progress.update) for file in files])


def _checksum(file: Path, update: Callable[[int], object]) -> str:
    """The hub's cache has links to files that are named by their sha256, under which they were fetched: these are not read."""
    blob = file.resolve()
    if file.is_symlink() and blob.parent.name == BLOBS and SHA256.fullmatch(blob.name):
        update(blob.stat().st_size)
        return blob.name
    return sha256_file(file, update)


def prepare_from_wheel(name: str, entry: dict[str, Any], wheel: Path, directory: Path) -> None:
    """Prepare a `wheel` entry at `directory`."""
    quiet()
    with directory_whole(directory) as temporary:
        dequantise(wheel, entry["member"], temporary)
        write_sealed(temporary / CARD, make_card(name, entry, temporary) | {"location": str(directory)})


def prepare_by_reference(name: str, entry: dict[str, Any], directory: Path) -> None:
    """Prepare a `hub` or `local` entry: only the card lies at `directory`, the weights stay where they are.

    Beside `directory` a file notes the commit of a `hub` entry; see `check_same_commit`.
    """
    quiet()
    if entry["kind"] == "hub":
        folder, commit = fetch_snapshot(entry["repository"], entry["revision"], [CONFIG])
        check_same_commit(directory.with_name(f".{directory.name}.commit.json"), name, entry, commit)
        check_config(name, folder)
        entry, location = entry | {"revision": commit}, fetch_snapshot(entry["repository"], commit)[0]
    else:
        location = Path(entry["path"]).resolve()
    with directory_whole(directory) as temporary:
        write_sealed(temporary / CARD, make_card(name, entry, location))
