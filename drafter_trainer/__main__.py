"""`python -m drafter_trainer`."""

import sys

from drafter_trainer.cli import main

sys.exit(main())
