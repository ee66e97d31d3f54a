"""`python -m slipstream.cli`, for where the console script is not on the path."""

import sys

from slipstream.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
