"""``python -m futransformer``: the command line."""

import sys

from futransformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
