"""Files are whole or absent, whatever interrupts the writer; and equal values have equal fingerprints."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from kvferry.errors import KvferryError
from kvferry.files import (
    check_room,
    directory_whole,
    fingerprint,
    read_json,
    sha256_file,
    write_json,
    write_text,
    written_whole,
)

KINDS = pytest.mark.parametrize("whole", [written_whole, directory_whole])


def fill(whole, temporary, text):
    """Put `text` where `whole` gave a name: into the file, or into a file in the directory."""
    (temporary if whole is written_whole else temporary / "part").write_text(text)


def interrupt(whole, path, error):
    """Write a half, then fail."""
    with whole(path) as temporary:
        fill(whole, temporary, "half")
        raise error


def text_of(whole, path):
    return (path if whole is written_whole else path / "part").read_text()


@pytest.fixture
def dead_pid():
    """The number of a process that has just ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


@KINDS
def test_nothing_is_at_the_path_before_the_end_and_only_the_whole_afterwards(tmp_path, whole):
    path = tmp_path / "deeper" / "out"
    with whole(path) as temporary:
        fill(whole, temporary, "new")
        assert not path.exists()
    assert text_of(whole, path) == "new"
    assert list(path.parent.iterdir()) == [path]


@KINDS
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, KvferryError])
def test_an_exception_leaves_nothing_and_goes_on(tmp_path, whole, error):
    with pytest.raises(error):
        interrupt(whole, tmp_path / "out", error)
    assert list(tmp_path.iterdir()) == []


@KINDS
def test_an_exception_leaves_what_was_there_before(tmp_path, whole):
    path = tmp_path / "out"
    with whole(path) as temporary:
        fill(whole, temporary, "old")
    with pytest.raises(ValueError, match="stop"):
        interrupt(whole, path, ValueError("stop"))
    assert text_of(whole, path) == "old"
    assert list(tmp_path.iterdir()) == [path]


@KINDS
def test_what_was_there_is_replaced(tmp_path, whole):
    path = tmp_path / "out"
    for text in ("old", "new"):
        with whole(path) as temporary:
            fill(whole, temporary, text)
    assert text_of(whole, path) == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_directory_keeps_no_file_of_the_old_one(tmp_path):
    path = tmp_path / "out"
    for name in ("old", "new"):
        with directory_whole(path) as temporary:
            (temporary / name).touch()
    assert [file.name for file in path.iterdir()] == ["new"]


def test_a_reader_sees_the_old_file_or_the_new_one_but_never_a_mixture(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    with path.open() as reader:
        with written_whole(path) as temporary:
            temporary.write_text("new")
            assert path.read_text() == "old"
        assert path.read_text() == "new"
        assert reader.read() == "old"


@KINDS
@pytest.mark.parametrize("left_as", ["file", "directory"])
def test_leftovers_of_dead_processes_are_removed(tmp_path, whole, dead_pid, left_as):
    left = tmp_path / f".out.{dead_pid}.part"
    if left_as == "file":
        left.touch()
    else:
        left.mkdir()
        (left / "half").touch()
    with whole(tmp_path / "out") as temporary:
        fill(whole, temporary, "new")
    assert not left.exists()


@KINDS
def test_leftovers_of_live_processes_stay(tmp_path, whole):
    left = tmp_path / f".out.{os.getppid()}.part"
    left.write_text("being written")
    with whole(tmp_path / "out") as temporary:
        fill(whole, temporary, "new")
    assert left.read_text() == "being written"


@KINDS
def test_leftovers_for_other_names_stay(tmp_path, whole, dead_pid):
    left = tmp_path / f".other.{dead_pid}.part"
    left.touch()
    with whole(tmp_path / "out") as temporary:
        fill(whole, temporary, "new")
    assert left.exists()


@KINDS
def test_a_leftover_of_a_dead_process_that_had_our_own_number_does_no_harm(tmp_path, whole):
    left = tmp_path / f".out.{os.getpid()}.part"
    if whole is directory_whole:
        left.mkdir()
        (left / "half").touch()
    else:
        left.write_text("half")
    with whole(tmp_path / "out") as temporary:
        fill(whole, temporary, "new")
    assert text_of(whole, tmp_path / "out") == "new"
    if whole is directory_whole:
        assert [file.name for file in (tmp_path / "out").iterdir()] == ["part"]


def test_a_path_that_cannot_be_written_is_named_in_one_sentence(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    with pytest.raises(KvferryError, match=r"out: cannot be written \(.+\); free space or change permissions"):
        write_text(path, "text")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_json_refuses_what_is_not_a_number_and_leaves_nothing(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "out.json", {"r2": [1.0, number]})
    assert list(tmp_path.iterdir()) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_json_comes_back_as_it_was(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "out.json"
    write_json(path, value)
    assert read_json(path) == value


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"a": 1', b"not json", b"\xff\xfe\x00"])
def test_broken_json_is_named_with_what_it_should_be(tmp_path, content):
    path = tmp_path / "card.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KvferryError, match=r"card\.json: unreadable model card \(.*\); delete it and run again"):
        read_json(path, "model card")


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_the_checksum_is_that_of_the_whole_file(tmp_path, size):
    path, content = tmp_path / "file", os.urandom(size)
    path.write_bytes(content)
    told = []
    assert sha256_file(path, told.append) == hashlib.sha256(content).hexdigest()
    assert sum(told) == size


@given(st.dictionaries(st.text(), JSON, max_size=5), st.randoms())
def test_fingerprints_do_not_depend_on_the_order_of_keys(value, random):
    keys = list(value)
    random.shuffle(keys)
    assert fingerprint({key: value[key] for key in keys}) == fingerprint(value)


@given(JSON, JSON)
def test_fingerprints_differ_where_json_differs(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (fingerprint(one) == fingerprint(other)) == same


def interrupted_by(write, whole, path):
    """Write a half, then meet what `write` raises."""
    with whole(path) as temporary:
        fill(whole, temporary, "half")
        write()


def fill_the_disk():
    """A write that finds no space left."""
    with open("/dev/full", "w") as disk:
        disk.write("x")


def as_safetensors_says_it():
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@KINDS
@pytest.mark.parametrize("write", [fill_the_disk, as_safetensors_says_it])
def test_a_full_disk_is_said_with_the_room_that_there_is_and_leaves_nothing(tmp_path, whole, write):
    with pytest.raises(KvferryError, match=rf"out: the disk is full \([\d,]+ MB are free in {tmp_path}\); free some"):
        interrupted_by(write, whole, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@KINDS
def test_what_is_wrong_otherwise_with_safetensors_goes_on(tmp_path, whole):
    with pytest.raises(SafetensorError, match="another"):
        interrupt(whole, tmp_path / "out", SafetensorError("another"))


def test_what_there_is_no_room_for_is_not_begun(tmp_path):
    folder = tmp_path / "not" / "there"
    check_room(folder, 1, "a dump")
    with pytest.raises(
        KvferryError, match=r"there: a dump takes [\d,]+ MB, and [\d,]+ MB are free on that disk; .*`results`"
    ):
        check_room(folder, 10**18, "a dump")
    assert list(tmp_path.iterdir()) == []
