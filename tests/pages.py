"""The pages that a newcomer reads, for tests: their fenced blocks, and the scripts beside them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """(page, text) of every fenced block in one of these languages; "" for blocks that name none."""
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language in languages:
                yield page.name, text


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
