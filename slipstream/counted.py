"""Numbers of things in words."""


def counted(number: int, noun: str) -> str:
    """`1 document`, `1,216 documents`; for nouns that take an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
