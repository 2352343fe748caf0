"""The command line: `kvferry COMMAND …`, also `python -m kvferry`. One module a command; `main` holds the table of them.

May use every package of kvferry; none of them uses this one.
"""

from kvferry.cli.main import main

__all__ = ["main"]
