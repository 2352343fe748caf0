"""`python -m kvferry`: the command line."""

import sys

from kvferry.cli import main

sys.exit(main())
