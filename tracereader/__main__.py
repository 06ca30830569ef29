"""python -m tracereader: the command read-trace."""

import sys

from tracereader.cli import entry

sys.exit(entry())
