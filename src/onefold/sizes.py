"""Sizes as people write them: "8GB", "24GiB", "60%", 1_000_000.

Decimal units are powers of 1000, binary units ("GiB") powers of 1024. A percentage is
of a total that the caller names. Knows nothing of MLX.
"""

from __future__ import annotations

import math
import re

from onefold.errors import ConfigError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter] = _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "IB"] = 1024**_power

_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*(%|[A-Za-z]*)\s*")


def parse_size(size: int | float | str, *, total_bytes: int | None = None) -> int:
    """Returns the bytes of `size`; a percentage is a share of `total_bytes`. Raises ConfigError for anything else."""
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise ConfigError(f"a size is a number or a string such as '8GB', not {size!r}")
    if isinstance(size, (int, float)):
        return _whole(size, size)
    found = _SIZE.fullmatch(size)
    like = "write it like '8GB' or '24GiB'" if total_bytes is None else "write it like '8GB', '24GiB' or '60%'"
    if found is None:
        raise ConfigError(f"cannot read {size!r} as a size; {like}")
    number, unit = float(found[1].replace("_", "")), found[2].upper()
    if unit == "%":
        if total_bytes is None:
            raise ConfigError(f"{size!r} is a share, and a share is not allowed here; {like}")
        if not 0 < number <= 100:
            raise ConfigError(f"{size!r} is not between 0% and 100%")
        return _whole(total_bytes * number / 100, size)
    if unit not in _UNITS:
        raise ConfigError(f"unknown unit {found[2]!r} in {size!r}; use KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return _whole(number * _UNITS[unit], size)


def _whole(n_bytes: int | float, size: int | float | str) -> int:
    """Bytes as an integer; `size` is what was written."""
    if isinstance(n_bytes, float) and not math.isfinite(n_bytes):
        raise ConfigError(f"a size must be finite, got {size!r}")
    if n_bytes < 1:
        raise ConfigError(f"a size must be at least one byte, got {size!r}")
    return int(n_bytes)


def show_count(n: int, noun: str) -> str:
    """Returns a number of things as text for messages: "1 token", "2 tokens"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def show_size(n_bytes: int | float) -> str:
    """Returns bytes as text for messages: 1536 is '1.5 kB'."""
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"
