"""Where a number comes from: versions, commit, time and memory of the run. Knows no result."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from kvferry.files import fingerprint

PACKAGES = ("kvferry", "torch", "transformers", "lm-eval", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a number."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def commit() -> str:
    """The commit of the working tree, with `+changes` if files that git tracks differ; `unknown` outside a repository."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def code_id() -> str:
    """Hash of the modules that decide an evaluation: everything of this package before its report stage."""
    root = Path(__file__).parent
    files = sorted(file for stage in ("prepare", "kv", "fit", "evaluate") for file in (root / stage).glob("*.py"))
    return fingerprint([[file.name, file.read_text()] for file in files])


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass
class Stopwatch:
    """Seconds since it was made."""

    start: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self.start
