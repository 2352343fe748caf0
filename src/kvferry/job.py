"""One job of a run: a log file, a fixed number of threads, errors in one sentence. Knows no work and no workflow engine."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.errors import KvferryError
from kvferry.provenance import Stopwatch, commit, peak_memory_bytes, versions
from kvferry.trouble import in_words


@contextmanager
def job(what: str, log: str, threads: int | None = None) -> Iterator[None]:
    """Run the body with its log at `log`; a failure is logged with its traceback and said in one sentence, with exit status 1.

    Failures are a KvferryError and what the machine has too little of; any other exception goes on as it is.

    threads: of torch's arithmetic, for jobs that use it.
    """
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=log, filemode="w", level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    watch = Stopwatch()
    logging.info("%s: begins; commit %s, %s", what, commit(), versions())
    try:
        if threads:
            import torch

            torch.set_num_threads(threads)
        yield
    except Exception as error:
        logging.error("%s", traceback.format_exc())
        sentence = str(error) if isinstance(error, KvferryError) else in_words(error)
        if sentence is None:
            raise
        print(f"{what}: {sentence}", file=sys.stderr)
        raise SystemExit(1) from error
    logging.info("%s: done in %.1f s, peak memory %.0f MB", what, watch.seconds(), peak_memory_bytes() / 1e6)
