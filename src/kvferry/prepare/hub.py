"""The hub: a repository's snapshot at a revision, and in one sentence why there is none. Does not know what a model is.

A model that is not pinned to a commit may move between two runs; its commit is noted beside its results, and another one later
is refused, since mappers, dumps and records of one run are of one set of weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvferry.errors import KvferryError, first_line
from kvferry.files import is_full, read_json, room_in, write_json

NEWEST = "unpinned"
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
COMMIT = re.compile("[0-9a-f]{40}")


def fetch_snapshot(repository: str, revision: str, patterns: Sequence[str] = PATTERNS) -> tuple[Path, str]:
    """Download a repository, or those of its files that match a pattern. Returns its folder and the commit that it is.

    Raises:
        KvferryError: no network, no such repository or revision, one that this account may not read, a full disk, or another
            commit than the one that is asked for.
    """
    from huggingface_hub import snapshot_download

    wanted = None if revision == NEWEST else revision
    try:
        folder = Path(snapshot_download(repository, revision=wanted, allow_patterns=list(patterns)))
    except (HTTPError, OSError, ValueError) as error:
        raise KvferryError(
            f"{repository} at {revision} cannot be fetched from the hub: {_reason(error, revision)}"
        ) from error
    if COMMIT.fullmatch(revision) and folder.name != revision:
        raise KvferryError(
            f"{repository} is asked for at commit {revision}, and {folder.name} came; "
            f"remove {folder.parent.parent} and run again, or name the commit that you want"
        )
    return folder.resolve(), folder.name


def _reason(error: Exception, revision: str) -> str:
    """What is wrong, and what to do about it."""
    if isinstance(error, GatedRepoError):
        state = "this account has no access to it" if get_token() else "no access token is given"
        return (
            f"it is gated and {state}; accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository, or it is private; correct its name, or set HF_TOKEN to a token that may read it"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {revision}; name a commit, tag or branch that it has, or {NEWEST}"
    if isinstance(error, HFValidationError):
        return f"that is no name of a repository ({first_line(error)}); correct it"
    if is_full(error):
        room = room_in(Path(constants.HF_HUB_CACHE))
        return f"the disk is full ({room}); free some, or set HF_HOME to a folder on a larger one"
    return _unreachable(error)


def _unreachable(error: Exception) -> str:
    """The same where the hub does not answer, or is not to be asked."""
    cache, own = constants.HF_HUB_CACHE, (error, error.__cause__)
    held = "only a part of it is" if isinstance(error, IncompleteSnapshotError) else "it is not"
    if any(isinstance(one, OfflineModeIsEnabled) for one in own):
        return f"HF_HUB_OFFLINE is set and {held} in the cache {cache}; unset that, or bring the snapshot there"
    if isinstance(error, HfHubHTTPError):
        return f"the hub refuses ({first_line(error)}); try again later, and look at your access token if it stays so"
    if isinstance(error, LocalEntryNotFoundError | HTTPError | ConnectionError | TimeoutError):
        why = first_line(error.__cause__ or error)
        return f"the hub cannot be reached ({why}) and {held} in the cache {cache}; check the network and the proxy"
    return f"{first_line(error)}; check the name, the network and your access token"


def check_same_commit(note: Path, name: str, entry: dict[str, Any], commit: str) -> None:
    """Compare a commit with the one in the file `note`, which is made where it is not there or was of another entry.

    Raises:
        KvferryError: the same entry now gives another commit.
    """
    asked = {key: entry[key] for key in ("repository", "revision")}
    before = read_json(note, "note of a commit") if note.exists() else {}
    if before and before != asked | {"commit": commit} and {key: before.get(key) for key in asked} == asked:
        raise KvferryError(
            f"model {name}: {asked['repository']} at {asked['revision']} was commit {before['commit']} when these results "
            f"were begun and is {commit} now; set revision: {before['commit']} to go on with them, "
            f"or delete {note} to make everything of this model anew"
        )
    write_json(note, asked | {"commit": commit})
