"""YAML files: read strictly. Knows the mistakes that PyYAML lets pass; does not know what any file is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvferry.errors import KvferryError


def read_yaml(path: Path) -> object:
    """Read a YAML file.

    Raises KvferryError, with the line where there is one, if the file is missing or unreadable, is not YAML, or says
    a key twice.
    """
    try:
        # `_Loader` is a SafeLoader: it builds plain values only.
        value = yaml.load(path.read_bytes(), Loader=_Loader)
    except OSError as error:
        raise KvferryError(f"{path}: {error.strerror}; create the file or correct its path") from error
    except yaml.YAMLError as error:
        raise KvferryError(_yaml_sentence(path, error)) from error
    if _holds_itself(value, ()):
        raise KvferryError(f"{path}: an alias (*) stands within what it refers to; write it out there")
    return value


def _holds_itself(value: Any, around: tuple[int, ...]) -> bool:
    """Whether a list or mapping is part of itself; `around`: those that this one is in."""
    if not isinstance(value, dict | list):
        return False
    if id(value) in around:
        return True
    parts = value.values() if isinstance(value, dict) else value
    return any(_holds_itself(part, (*around, id(value))) for part in parts)


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses a key said twice, of which PyYAML would silently keep the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Compose a mapping; done before merges (`<<`) are resolved, which may rightly repeat a key."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                what = f"the key {key.value!r} is there twice in one mapping"
                raise yaml.constructor.ConstructorError(problem=what, problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


def _yaml_sentence(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}, line {mark.line + 1}" if mark else f"{path}"
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is not YAML"
    return f"{place}: {' '.join(str(what).split())}; correct the YAML there"
