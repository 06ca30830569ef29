"""python -m tracereader: the command read-trace."""

import tracereader.interrupts  # noqa: F401  first, so that Ctrl-C is answered from here on

# isort: split
import sys

from tracereader.cli import entry

sys.exit(entry())
