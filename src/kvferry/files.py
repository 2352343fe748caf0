"""Files that are whole or absent: written under a temporary name, then renamed; checksums; JSON with its own; room on a disk.

Knows no contents.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kvferry.errors import KvferryError

MB = 1_000_000
SEAL = "seal"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; on success it is renamed to `path`, on failure removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _part(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise _unwritten(path, error) from error
    except SafetensorError as error:
        if is_full(error):
            raise _unwritten(path, error) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def directory_whole(path: Path) -> Iterator[Path]:
    """As `written_whole`, for a directory that is filled and then renamed. What was there before is never seen in part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _part(path)
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            os.replace(path, old := path.with_name(f".{path.name}.old.{os.getpid()}.part"))
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        if is_full(error):
            raise _unwritten(path, error) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or what one may take of it, is full. safetensors has only words for that."""
    if isinstance(error, SafetensorError):
        return "os error 28" in str(error) or "os error 122" in str(error)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def check_room(folder: Path, needed: int, what: str) -> None:
    """Refuse to begin what the disk of `folder`, which need not be there, has no room for. needed: in bytes.

    Raises:
        KvferryError: less is free.
    """
    free = shutil.disk_usage(_existing(folder)).free
    if needed > free:
        raise KvferryError(
            f"{folder}: {what} takes {needed / MB:,.0f} MB, and {free / MB:,.0f} MB are free on that disk; free some, "
            "or set `results` to a folder on a larger one"
        )


def room_in(folder: Path) -> str:
    """How much is free on the disk of a folder, in words."""
    return f"{shutil.disk_usage(_existing(folder)).free / MB:,.0f} MB are free in {folder}"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(own for own in (folder.absolute(), *folder.absolute().parents) if own.exists())


def _unwritten(path: Path, error: OSError | SafetensorError) -> KvferryError:
    """A file or folder that cannot be written, in one sentence."""
    if is_full(error):
        remedy = "free some, or set the folder in the config to one on a larger disk, and run again"
        return KvferryError(f"{path}: the disk is full ({room_in(path.parent)}); {remedy}")
    reason = error.strerror if isinstance(error, OSError) else None
    return KvferryError(f"{path}: cannot be written ({reason or error}); free space or change permissions")


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
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. NaN is refused: a result that is not a number is no result."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, what: str = "file") -> Any:
    """Read JSON.

    Raises:
        KvferryError: it is missing or broken; names the file and `what` it should be.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KvferryError(f"{path}: unreadable {what} ({error}); delete it and run again") from error


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object as `write_json` does, with a fingerprint of itself as its SEAL, so that a later change shows."""
    write_json(path, value | {SEAL: fingerprint(value)})


def read_sealed(path: Path, what: str, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Read what `write_sealed` wrote, without its seal. An object without one, written by other means, is taken as it is.

    Raises:
        KvferryError: missing, broken, no JSON object, without some of `keys`, or changed since it was written.
    """
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise KvferryError(f"{path}: not a {what} but {type(value).__name__}; delete it and run again")
    if not is_sealed(value):
        raise KvferryError(f"{path}: the {what} was changed since it was written; delete it and run again")
    if missing := [key for key in keys if key not in value]:
        raise KvferryError(f"{path}: the {what} lacks {', '.join(missing)}; delete it and run again")
    return {key: part for key, part in value.items() if key != SEAL}


def is_sealed(value: dict[str, Any]) -> bool:
    """Whether the seal of an object, if it has one, is still that of the rest."""
    return value.get(SEAL) in (None, fingerprint({key: part for key, part in value.items() if key != SEAL}))


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
