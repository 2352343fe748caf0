"""What a machine has too little of, in one sentence: memory of a GPU, main memory, or disk. Knows no job.

Errors that say something else are not told here: they are bugs, or have their own sentence where they come up.
"""

from __future__ import annotations

import sys

from kvferry.files import is_full

LESS = "lower evaluation.batch_tokens and evaluation.cache_mb (fit.memory_mb for a fit, calibration.length for a dump)"


def in_words(error: BaseException) -> str | None:
    """The sentence for an error of too little memory or disk; None for any other error."""
    if _of_gpu(error):
        remedy = f"{LESS}, or give the models more GPUs: compute.device, source_device and target_device take lists"
        return f"out of GPU memory ({_first_sentence(error)}); {remedy}"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return f"out of main memory ({_first_sentence(error)}); {LESS}, or run it where there is more"
    if is_full(error):
        where = getattr(error, "filename", None)
        return f"the disk is full{f' ({where})' if where else ''}; free some, or write to a larger one, and run again"
    return None


def _of_gpu(error: BaseException) -> bool:
    """Whether a GPU's memory is out. Who never imported torch has not used it up."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _first_sentence(error: BaseException) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first.split(". ")[0].rstrip(".")
