"""kvferry: move the KV cache that one model computed to another model of its family, and measure what that keeps and saves.

Data flows one way: prepare → kv → fit → evaluate → report. A package imports only from those before it, and from the
modules beside this file; `api` and `cli` import from all, and nothing from them. Nothing here knows Snakemake.

For your own programs: `load_model`, `load_mapper`, `Ferry`, `Handoff`, `Session` (docs/api.md). They bring torch, which takes
seconds to import, so they are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.errors import KvferryError

if TYPE_CHECKING:
    from kvferry.api import Ferry, Generation, Handed, Handoff, Session, Switch, load_mapper, load_model

__version__ = "0.1.0"
__all__ = [
    "Ferry",
    "Generation",
    "Handed",
    "Handoff",
    "KvferryError",
    "Session",
    "Switch",
    "__version__",
    "load_mapper",
    "load_model",
]


def __getattr__(name: str) -> Any:
    """A name of `kvferry.api`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
