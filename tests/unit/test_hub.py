"""What the hub says when it gives nothing, each in one sentence with its remedy; and a model that moved between two runs."""

import errno

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvferry.errors import KvferryError
from kvferry.files import read_json
from kvferry.prepare import hub
from kvferry.prepare.hub import check_same_commit, fetch_snapshot

COMMIT, OTHER = "a" * 40, "b" * 40
ENTRY = {"kind": "hub", "repository": "owner/tiny", "revision": "unpinned"}


def http(kind, status=404):
    """An error as the library makes it, of several lines."""
    request = httpx2.Request("GET", "https://hub.invalid/owner/tiny")
    return kind(f"{status} Client Error.\n\nfor url: x", response=httpx2.Response(status, request=request))


def caused(error, cause):
    error.__cause__ = cause
    return error


REFUSALS = {
    "gated": (http(GatedRepoError, 403), ["gated", "no access token is given", "accept its terms", "HF_TOKEN"]),
    "no repository": (http(RepositoryNotFoundError), ["no such repository", "private", "correct its name"]),
    "no revision": (http(RevisionNotFoundError), ["no revision v3", "commit, tag or branch"]),
    "no name": (HFValidationError("Repo id must use alphanumeric chars: 'a b'."), ["no name of a repository", "'a b'"]),
    "offline": (
        caused(LocalEntryNotFoundError("outgoing traffic has been disabled"), OfflineModeIsEnabled("offline")),
        ["HF_HUB_OFFLINE is set", "it is not in the cache", "bring the snapshot there"],
    ),
    "offline, a part": (
        caused(IncompleteSnapshotError("some files are missing", "x"), OfflineModeIsEnabled("offline")),
        ["HF_HUB_OFFLINE is set", "only a part of it is in the cache"],
    ),
    "no network": (
        caused(
            LocalEntryNotFoundError("Got: ConnectError\nAn error happened"), httpx2.ConnectError("no route to host")
        ),
        ["cannot be reached (no route to host)", "check the network and the proxy"],
    ),
    "no proxy": (httpx2.ProxyError("403 Forbidden"), ["cannot be reached (403 Forbidden)", "the proxy"]),
    "cut off": (httpx2.ReadTimeout("timed out"), ["cannot be reached (timed out)"]),
    "broken hub": (http(HfHubHTTPError, 503), ["refuses (503 Client Error)", "try again later"]),
    "full disk": (OSError(errno.ENOSPC, "No space left on device"), ["the disk is full", "MB are free in", "HF_HOME"]),
    "anything else": (OSError("Distant resource does not have a Content-Length.\nReally"), ["Distant resource"]),
    "nothing said": (OSError(""), ["OSError"]),
}


@pytest.fixture
def snapshot(monkeypatch):
    """Have the library give something, or raise."""
    monkeypatch.setattr(hub, "get_token", lambda: None)

    def answer(result):
        def download(*_, **__):
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    return answer


@pytest.mark.parametrize(("error", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_the_hub_does_not_give_is_said_in_one_sentence(error, words, snapshot):
    snapshot(error)
    with pytest.raises(KvferryError) as caught:
        fetch_snapshot("owner/tiny", "v3")
    message = str(caught.value)
    assert message.startswith("owner/tiny at v3 cannot be fetched from the hub: ")
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_token_that_does_not_open_a_gated_repository_is_told_apart_from_none(snapshot, monkeypatch):
    snapshot(http(GatedRepoError, 403))
    monkeypatch.setattr(hub, "get_token", lambda: "hf_x")
    with pytest.raises(KvferryError, match="gated and this account has no access to it"):
        fetch_snapshot("owner/tiny", "unpinned")


@pytest.mark.parametrize(
    ("repository", "revision"), [("owner/missing", "unpinned"), ("owner/tiny", "c" * 40), ("a b", "x")]
)
def test_the_library_itself_is_understood_without_a_network(repository, revision, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(KvferryError, match="no name of a repository" if " " in repository else "HF_HUB_OFFLINE is set"):
        fetch_snapshot(repository, revision)


def test_another_commit_than_the_registry_says_is_refused(snapshot, tmp_path):
    for commit in (COMMIT, OTHER):
        (tmp_path / "snapshots" / commit).mkdir(parents=True)
    snapshot(tmp_path / "snapshots" / COMMIT)
    assert fetch_snapshot("owner/tiny", COMMIT) == (tmp_path / "snapshots" / COMMIT, COMMIT)
    assert fetch_snapshot("owner/tiny", "main")[1] == COMMIT
    with pytest.raises(KvferryError, match=f"asked for at commit {OTHER}, and {COMMIT} came; remove .+ and run again"):
        fetch_snapshot("owner/tiny", OTHER)


class TestMoved:
    def test_the_first_commit_is_noted_and_the_same_one_is_taken_again(self, tmp_path):
        for _ in range(2):
            check_same_commit(tmp_path / "note", "tiny", ENTRY, COMMIT)
        assert read_json(tmp_path / "note") == {"repository": "owner/tiny", "revision": "unpinned", "commit": COMMIT}

    def test_another_commit_of_the_same_entry_is_refused_with_both_ways_out(self, tmp_path):
        check_same_commit(tmp_path / "note", "tiny", ENTRY, COMMIT)
        with pytest.raises(KvferryError) as caught:
            check_same_commit(tmp_path / "note", "tiny", ENTRY, OTHER)
        message = str(caught.value)
        assert f"was commit {COMMIT} when these results were begun and is {OTHER} now" in message
        assert f"set revision: {COMMIT}" in message
        assert f"delete {tmp_path / 'note'}" in message
        assert read_json(tmp_path / "note")["commit"] == COMMIT

    @pytest.mark.parametrize("change", [{"revision": OTHER}, {"repository": "owner/other"}])
    def test_a_changed_entry_is_another_wish(self, change, tmp_path):
        check_same_commit(tmp_path / "note", "tiny", ENTRY, COMMIT)
        check_same_commit(tmp_path / "note", "tiny", ENTRY | change, OTHER)
        assert read_json(tmp_path / "note")["commit"] == OTHER
