"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.errors import ConfigError, OnefoldError
from onefold.sizes import parse_size, show_size


@pytest.mark.parametrize(
    ("size", "n_bytes"),
    [
        (1, 1),
        (1_000_000, 1_000_000),
        (10**30, 10**30),
        (1536.7, 1536),
        ("1", 1),
        ("512B", 512),
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("8G", 8 * 10**9),
        (" 8 GB ", 8 * 10**9),
        ("24GiB", 24 << 30),
        ("1.5KiB", 1536),
        ("0.5MB", 500_000),
        ("2TB", 2 * 10**12),
        ("1_000kb", 1_000_000),
        ("3MiB", 3 << 20),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_that_are_understood(size: Any, n_bytes: int) -> None:
    assert parse_size(size) == n_bytes


def test_a_share_is_of_a_total() -> None:
    assert parse_size("60%", total_bytes=1000) == 600
    assert parse_size("100%", total_bytes=16 << 30) == 16 << 30
    assert parse_size("12.5 %", total_bytes=800) == 100
    with pytest.raises(ConfigError, match="a share is not allowed here"):
        parse_size("60%")
    for size in ("0%", "101%", "1e2%", "-5%"):
        with pytest.raises(ConfigError):
            parse_size(size, total_bytes=1000)


@pytest.mark.parametrize(
    "size",
    [
        0,
        -1,
        0.0,
        0.5,
        -0.5,
        float("nan"),
        float("inf"),
        float("-inf"),
        True,
        False,
        None,
        [],
        b"8GB",
        "",
        " ",
        "GB",
        "%",
        "0",
        "0GB",
        "-8GB",
        "+8GB",
        "8.GB",
        ".5GB",
        "1e9",
        "8 G B",
        "8GBs",
        "8PB",
        "8XiB",
        "eight",
        "8,5GB",
        "nan",
        "inf",
        "0.0001B",
        "٣GB",
        "9" * 400 + "GB",
    ],
    ids=lambda s: repr(s)[:20],
)
def test_nonsense_is_a_config_error_that_shows_it(size: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(size, total_bytes=1000)
    assert repr(size) in str(caught.value) and isinstance(caught.value, OnefoldError)


def test_a_share_is_offered_only_where_there_is_a_total() -> None:
    for total in (None, 1000):
        with pytest.raises(ConfigError, match="write it like") as caught:
            parse_size("much", total_bytes=total)
        assert ("60%" in str(caught.value)) == (total is not None)
    with pytest.raises(ConfigError, match=r"; write it like '8GB' or '24GiB'$"):
        parse_size("10%")


def test_a_share_of_less_than_a_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one byte"):
        parse_size("0.0001%", total_bytes=1000)


@given(st.text(max_size=12))
def test_any_text_is_bytes_or_a_config_error(text: str) -> None:
    try:
        found = parse_size(text, total_bytes=1 << 34)
    except ConfigError:
        return
    assert isinstance(found, int) and found > 0


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1536, "1.5 kB"),
        (2_500_000, "2.5 MB"),
        (8 * 10**9, "8.0 GB"),
        (1.25e12, "1.25 TB"),
        (-1536, "-1.5 kB"),
    ],
)
def test_sizes_in_messages(n_bytes: float, shown: str) -> None:
    assert show_size(n_bytes) == shown


@given(st.integers(1, 10**14))
def test_what_is_shown_can_be_read_again(n_bytes: int) -> None:
    assert parse_size(show_size(n_bytes)) == pytest.approx(n_bytes, rel=0.06)
