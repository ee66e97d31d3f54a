"""Exit statuses of the command line beside those of errors (`SlipstreamError.exit_code`); docs/cli.md lists all."""

WAITED_IN_VAIN = 17
"""What --wait waits for did not come within --timeout."""
RUN_FAILED = 20
"""The run that was watched or waited for has failed."""
RUN_STOPPED = 21
"""The run that was watched was stopped, and can be resumed."""
DETACHED = 130
"""Ctrl-C: what was watched, or comes up in the background, goes on."""
