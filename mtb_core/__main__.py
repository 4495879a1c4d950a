"""``python -m mtb_core`` is ``mtb``."""

import sys

from mtb_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
