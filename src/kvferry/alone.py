"""Run a command unless another one holds the same lock: `python -m kvferry.alone LOCK COMMAND …`.

The lock goes with the process, however it ends, so a killed run leaves nothing to unlock. Knows nothing of the command.
"""

from __future__ import annotations

import fcntl
import os
import sys


def main(lock: str, *command: str) -> None:
    """Take the lock and become the command; exit status 1 if somebody has the lock."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another run holds {lock}: wait until it ends, or stop it")
    os.set_inheritable(handle, True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
