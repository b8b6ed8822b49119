"""``python -m plsh.conformance NAME``: the same as ``plsh conformance NAME``."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(["conformance", *sys.argv[1:]]))
