"""Files that are whole or absent: written under a temporary name, then renamed; and checksums. Knows no contents."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvferry.errors import KvferryError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; on success it is renamed to `path`, on failure removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _part(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise KvferryError(
            f"{path}: cannot be written ({error.strerror or error}); free space or change permissions"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def directory_whole(path: Path) -> Iterator[Path]:
    """As `written_whole`, for a directory that is filled and then renamed, replacing what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _part(path)
    temporary.mkdir()
    try:
        yield temporary
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _part(path: Path) -> Path:
    """A temporary name beside `path` for this process; what killed processes left under such names is removed."""
    for left in path.parent.glob(f".{path.name}.*.part"):
        owner = int(left.name.split(".")[-2])
        if owner == os.getpid() or not _alive(owner):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _alive(pid: int) -> bool:
    """Whether a process of this machine has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. NaN is refused: a result that is not a number is no result."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, what: str = "file") -> Any:
    """Read JSON, naming the file and `what` it should be when it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KvferryError(f"{path}: unreadable {what} ({error}); delete it and run again") from error


def sha256_file(path: Path, update: Callable[[int], object] | None = None) -> str:
    """Hex sha256 of a file; `update` is told the bytes read, for progress."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
            if update:
                update(len(block))
    return digest.hexdigest()


def fingerprint(value: Any) -> str:
    """Hex sha256 of a JSON-able value: equal values, equal fingerprints, whatever the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
