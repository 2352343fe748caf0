"""Finished records by what decides them, in a folder that outlives the job.

So a killed job goes on where it was, and a changed limit of one benchmark leaves the others alone. Does not know how a record
came about.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvferry.evaluate.setting import Contestant, Setting
from kvferry.files import fingerprint
from kvferry.records import Record, read_record


def missing(who: Contestant, setting: Setting, names: Iterable[str]) -> list[str]:
    """Those of the names that are asked of the contestant and not finished."""
    return [name for name in names if name in who.outputs and not kept_path(who, setting, name).exists()]


def keep(who: Contestant, setting: Setting, record: Record) -> None:
    """Keep a finished record."""
    record.write(kept_path(who, setting, record.benchmark))
    said = (who.name, record.benchmark, record.metric, record.value, record.n, record.seconds)
    logging.info("%s %s: %s %.4f, n=%d, %.1f s", *said)


def publish(who: Contestant, setting: Setting) -> None:
    """Write all records of the contestant to where they are asked for.

    Raises:
        KvferryError: one is not finished, or was damaged.
    """
    for name, path in who.outputs.items():
        read_record(kept_path(who, setting, name)).write(path)


def kept_path(who: Contestant, setting: Setting, name: str) -> Path:
    """Where a record is kept."""
    return who.outputs[name].parent / ".kept" / f"{name}-{fingerprint(_deciding(who, setting, name))[:16]}.json"


def _deciding(who: Contestant, setting: Setting, name: str) -> list[Any]:
    """All that decides a record: the system, the items, and what decides every record of the job."""
    if name in who.limits:
        items: Any = [who.limits[name], who.shard, setting.questions.facts()]
    else:
        items = [setting.config["perplexity"], setting.chunks_id]
    system = [who.name, who.pair, who.target, who.source, who.native_head, who.identity]
    return [name, system, items, setting.identity]
