"""The checkout that a command is run in: its schemas, and its configs with their registries. Knows no command."""

from __future__ import annotations

from pathlib import Path

from kvferry.config import Project, load_project, read_yaml
from kvferry.errors import KvferryError

CONFIGS, SCHEMAS = Path("config"), Path("workflow/schemas")
DEFAULT = CONFIGS / "config.yaml"


def in_checkout() -> bool:
    """Whether the working directory is the root of a checkout."""
    return SCHEMAS.is_dir()


def project_of(config: Path = DEFAULT) -> Project:
    """The checked config, with its registries.

    Raises:
        KvferryError: the working directory is no checkout, or the config or a registry is wrong.
    """
    if not in_checkout():
        raise KvferryError(
            f"{Path.cwd()}: no checkout of kvferry, since it has no {SCHEMAS}; change to the root of one"
        )
    return load_project(read_yaml(config), str(config), SCHEMAS)
