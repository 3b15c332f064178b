"""`python -m tiered_kv`."""

from __future__ import annotations

import sys

from tiered_kv.cli import main

if __name__ == "__main__":
    sys.exit(main())
