"""Models from where a user has them: a directory that a run prepared or in the hub's layout, a name on the hub, or memory.

Each comes with the card that a mapper's manifest is compared with. Does not know mappers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from kvferry.devices import SIZE_OF
from kvferry.errors import KvferryError
from kvferry.prepare.hub import NEWEST, fetch_snapshot
from kvferry.prepare.models import (
    CARD,
    CONFIG,
    Loaded,
    check_unchanged,
    config_id,
    location_of,
    make_card,
    quiet,
    read_card,
)
from kvferry.prepare.models import load_model as load_prepared

DEVICES = ("cpu", "cuda")
SNAPSHOTS, REPOSITORY = "snapshots", "models--"


def load_model(where: str | Path, device: str = "cpu", dtype: str = "float32") -> Loaded:
    """Load a model for inference, with its tokenizer (`.model`, `.tokenizer`, and `.card`: what it is).

    Args:
        where: a directory that a run prepared (`results/models/NAME`), any directory in the hub's layout, or a name on the hub,
            `OWNER/NAME` or `OWNER/NAME@REVISION`.
        device: cpu, cuda or cuda:N.
        dtype: of the weights and of the arithmetic: float32, bfloat16 or float16.

    Returns:
        The model in evaluation mode, its tokenizer, and its card: `model` (its name), `layers`, `kv_heads`, `head_dim`,
        `vocab_size`, `parameters`, `origin`, `config_sha256`, `tokenizer_sha256`, `weights_id` and more.

    Raises:
        KvferryError: there is no such model, it cannot be used, its files changed since a run prepared it, or the device or
            dtype is not there.

    Example:
        >>> small = load_model("results/models/smollm2-24l")
        >>> small.card["model"], small.model.dtype
        ('smollm2-24l', torch.float32)
    """
    _check_compute(device, dtype)
    directory = _directory(str(where))
    return load_prepared(directory, device, dtype, card_at(directory))


def _check_compute(device: str, dtype: str) -> None:
    if dtype not in SIZE_OF:
        raise KvferryError(f"dtype: {dtype!r} is not known; use one of {', '.join(SIZE_OF)}")
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise KvferryError(f"device: {device!r} is no device of torch; use cpu or cuda") from error
    if kind not in DEVICES:
        raise KvferryError(f"device: {device!r} is not supported; use one of {', '.join(DEVICES)}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise KvferryError(f"device: {device} is asked for, but torch sees no CUDA device here; use cpu")


def _directory(where: str, revision: str | None = None) -> Path:
    """The directory that is meant; what is no directory and has the form of a name on the hub is fetched."""
    path = Path(where)
    if any((path / name).is_file() for name in (CARD, CONFIG)):
        return path
    name, _, asked = where.partition("@")
    if path.exists() or path.is_absolute() or name.count("/") != 1 or where.startswith("."):
        problem = f"holds neither {CARD} nor {CONFIG}" if path.is_dir() else "is no directory"
        raise KvferryError(
            f"{where}: {problem}; give the directory of a model, prepared by a run or in the hub's layout, or OWNER/NAME"
        )
    return fetch_snapshot(name, revision or asked or NEWEST)[0]


def card_at(directory: Path) -> dict[str, Any]:
    """The card of a model directory: the one that lies there, or what it would say.

    Raises:
        KvferryError: the card cannot be read, or there is no usable model.
    """
    if (directory / CARD).is_file():
        return read_card(directory)
    location = directory.resolve()
    if location.parent.name != SNAPSHOTS:
        return make_card(location.name, {"kind": "local", "path": str(location)}, location)
    repository = location.parents[1].name.removeprefix(REPOSITORY).replace("--", "/")
    entry = {"kind": "hub", "repository": repository, "revision": location.name}
    return make_card(repository.split("/")[-1], entry, location)


def identified(model: Loaded | PreTrainedModel) -> Loaded:
    """A model with its tokenizer and card. One that is only in memory is known by the files that it says it was loaded from.

    Weights that were changed in memory since then are not noticed.

    Raises:
        KvferryError: it does not say where its files are, or these have another config, or changed since a run prepared them.
    """
    if isinstance(model, Loaded):
        return model
    if not isinstance(model, PreTrainedModel):
        raise KvferryError(
            f"a {type(model).__name__} is no model; give what kvferry.load_model or transformers' from_pretrained returns"
        )
    if not model.name_or_path:
        raise KvferryError(
            f"this {type(model).__name__} does not say which files it was loaded from; load it with kvferry.load_model"
        )
    quiet()
    directory = _directory(model.name_or_path, getattr(model.config, "_commit_hash", None))
    card = card_at(directory)
    location = location_of(directory, card)
    tokenizer = AutoTokenizer.from_pretrained(location)
    if (directory / CARD).is_file():
        check_unchanged(card, location, tokenizer, directory)
    if config_id(model.config.get_text_config(decoder=True).to_dict()) != card["config_sha256"]:
        raise KvferryError(
            f"{location}: its config is not that of the model in memory; load it again and leave it as it is"
        )
    return Loaded(model, tokenizer, card)
