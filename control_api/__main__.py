"""`python -m control_api` is `control-api`."""

import sys

from control_api.cli import main

if __name__ == "__main__":
    sys.exit(main())
