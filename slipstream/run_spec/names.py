"""What a run, a trainer or a target may be called: fit for a path, a URL and a directory, and for a person to type."""

import re

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
NAME_RULE = "Lower case letters, digits, dot, dash, underscore; at most 63; the first and last a letter or digit."

_NAME = re.compile(NAME_PATTERN)


def is_name(text: str) -> bool:
    """Whether something may be called that."""
    return _NAME.fullmatch(text) is not None
