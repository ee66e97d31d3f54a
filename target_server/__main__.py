"""`python -m target_server` is `target-server`."""

import sys

from target_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
