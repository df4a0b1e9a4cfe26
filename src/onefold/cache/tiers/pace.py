"""How long something takes, measured while it is done. Knows nothing of what it is."""

from __future__ import annotations

_WEIGHT = 0.3
TRY_AGAIN = 16
"""How many times it is judged too slow before it is tried once more: it may have become quicker."""


class Pace:
    """Seconds per unit, of the last few times."""

    def __init__(self) -> None:
        self._per_unit: float | None = None
        self._passed_over = 0

    def took(self, seconds: float, units: int) -> None:
        """So many units took so long."""
        if units > 0 and seconds > 0:
            new = seconds / units
            self._per_unit = new if self._per_unit is None else (1 - _WEIGHT) * self._per_unit + _WEIGHT * new
            self._passed_over = 0

    def estimate(self, units: int) -> float | None:
        """Seconds; None if it was never done."""
        return None if self._per_unit is None else self._per_unit * units

    def passed_over(self) -> bool:
        """Count that it is judged too slow this time. Returns False if it should be tried all the same."""
        self._passed_over += 1
        if self._passed_over < TRY_AGAIN:
            return True
        self._passed_over = 0
        return False


def is_slower(reading: Pace, n_bytes: int, computing: Pace, n_tokens: int) -> bool:
    """Whether reading so many bytes takes longer than computing so many tokens, as far as both were measured; now and
    then it is tried all the same."""
    read, computed = reading.estimate(n_bytes), computing.estimate(n_tokens)
    return read is not None and computed is not None and read >= computed and reading.passed_over()
