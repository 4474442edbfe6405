"""`python -m sidecar` is the `sidegate` command."""

import sys

from sidecar.cli import main

sys.exit(main())
