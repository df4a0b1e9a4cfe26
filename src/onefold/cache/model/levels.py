"""What formats of stored KV and the kernels that write and read them share: the levels of TurboQuant, and the steps of
rotated formats that are tried.

Levels are those that fit a normal distribution of variance 1 best, by bits (Lloyd and Max).
"""

from __future__ import annotations

_POSITIVE = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}


_FEW = 5
_STEPS = 0.98, 0.92, 0.86


def steps(bits: int) -> tuple[float, ...]:
    """Returns the steps that are tried for a vector, as shares of the one that reaches its largest channel."""
    return _STEPS if bits <= _FEW else (1.0,)


def levels(bits: int) -> list[float]:
    """Returns them in ascending order."""
    return [*(-x for x in reversed(_POSITIVE[bits])), *_POSITIVE[bits]]


def levels_source(declaration: str) -> str:
    """Returns the C++ declaration of all of them, those of `bits` from 2 ** bits - 2 on."""
    every = [x for bits in sorted(_POSITIVE) for x in levels(bits)]
    return f"\n{declaration} of_levels[{len(every)}] = {{{{{', '.join(f'{x}f' for x in every)}}}}};\n"
