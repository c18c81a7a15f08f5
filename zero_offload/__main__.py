"""`python -m zero_offload` is the `zero-offload` command."""

import sys

from zero_offload.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
