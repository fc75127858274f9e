"""Numbers as people read them: `2.75 GB`, `3.87 TFLOP`, `12 casts`."""

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def _scaled(number: float, unit: str) -> str:
    exponent = 0
    while abs(number) >= 999.5 and exponent < len(_PREFIXES) - 1:
        number, exponent = number / 1000, exponent + 1
    digits = f"{number:.0f}" if not exponent or number >= 99.95 else f"{number:.3g}"
    return f"{digits} {_PREFIXES[exponent]}{unit}".strip()


def bytes_text(number: int) -> str:
    """Returns bytes with a decimal prefix.

    Example:
      >>> bytes_text(2_750_000_000)
      '2.75 GB'
    """
    return _scaled(number, "B")


def flops_text(number: int) -> str:
    """Returns a count of floating-point operations with a decimal prefix.

    Example:
      >>> flops_text(3_870_000_000_000)
      '3.87 TFLOP'
    """
    return _scaled(number, "FLOP")


def count_text(number: int, what: str) -> str:
    """Returns a number of things.

    Example:
      >>> count_text(1, "cast"), count_text(1200, "cast")
      ('1 cast', '1,200 casts')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")
