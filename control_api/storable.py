"""Objects that clients send and the store keeps as they are: what every JSON reader understands."""

import json
from typing import Any

_DEEPEST = 20


def storable(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse what json.loads reads but JSON cannot say (NaN), half characters, and nesting that exhausts a stack."""
    if _depth(value) > _DEEPEST:
        raise ValueError(f"nested deeper than {_DEEPEST} levels")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    return value


def _depth(value: Any, above: int = 0) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if above > _DEEPEST:
        return above
    return max((_depth(one, above + 1) for one in inner), default=above)
