"""Records of a shared store: where they lie on the grid, what they are called, and that nothing else is believed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.cache.memory.tokens import NAMED
from onefold.cache.tiers.remote.grid import HEAD_BYTES, MOST_TOKENS, VALUE_BYTES, addresses, record_tokens, root_of
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.values import MAGIC, SEAL_BYTES, Sealing, require_finite
from onefold.errors import RecordError

ABOUT = {"model": "a", "kv": 16}
HEAD = {"kind": "kv", "tokens": 64}


def chain(tokens: list[int], n: int, root: bytes = b"root") -> list[bytes]:
    return list(addresses(root, np.array(tokens, np.int32), n))


@pytest.mark.parametrize(
    ("token_bytes", "tokens", "edges"),
    [(131072, 31, 16), (38193, 104, 64), (46080, 88, 64), (64, 248, 256), (3_000_000, 1, 1), (16384, 248, 128)],
)
def test_a_record_fits_and_wastes_little(token_bytes: int, tokens: int, edges: int) -> None:
    """Checkpoints lie at powers of two. Other values are no larger than a power of two of bytes, with their heads."""
    assert record_tokens(token_bytes) == tokens
    assert record_tokens(token_bytes, edges=True) == edges
    for n in (tokens, edges):
        assert n * token_bytes + HEAD_BYTES <= VALUE_BYTES


def test_a_token_that_fits_into_no_value_has_no_record() -> None:
    assert record_tokens(VALUE_BYTES) == 0 and record_tokens(1, edges=True) == MOST_TOKENS


@given(st.lists(st.integers(0, 99), max_size=40), st.lists(st.integers(0, 99), max_size=40), st.sampled_from([1, 4, 8]))
def test_two_prompts_have_the_addresses_of_their_common_whole_records(a: list[int], b: list[int], n: int) -> None:
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))) // n
    ours, theirs = chain(a, n), chain(b, n)
    assert len(ours) == len(a) // n
    assert ours[:common] == theirs[:common]
    assert not set(ours[common:]) & set(theirs[common:])


def test_the_same_tokens_elsewhere_have_another_address() -> None:
    assert len(set(chain([1, 2] * 8, 2))) == 8
    roots = {root_of(ABOUT, ""), root_of(ABOUT, "x"), root_of({**ABOUT, "kv": "r5r4"}, ""), root_of({"model": "a"}, "")}
    assert len({chain([1, 2], 2, root)[0] for root in roots}) == 4
    assert root_of(dict(reversed(ABOUT.items())), "") == root_of(ABOUT, "")


def test_ids_that_one_process_has_given_end_the_chain() -> None:
    assert len(chain([1, 2, 3, 4, NAMED, 5, 6, 7], 2)) == 2


def test_the_type_and_layout_of_tokens_do_not_matter() -> None:
    wide = np.arange(64, dtype=np.int64)
    assert list(addresses(b"", wide[::2], 8)) == list(addresses(b"", np.arange(0, 64, 2, dtype=np.int32), 8))


def sealed(secret: bytes = b"s", name: bytes = b"n", payload: bytes = b"payload" * 9) -> bytes:
    return Sealing(secret).seal(name, HEAD, [memoryview(payload[:5]), memoryview(payload[5:])])


@pytest.mark.parametrize("secret", [b"", b"secret"])
def test_what_was_sealed_is_opened(secret: bytes) -> None:
    head, payload = Sealing(secret).open(b"n", sealed(secret), {"kind": "kv"})
    assert head == HEAD and bytes(payload) == b"payload" * 9


@pytest.mark.parametrize("secret", [b"", b"secret"])
def test_every_flipped_bit_is_found(secret: bytes) -> None:
    value = sealed(secret)
    for at in range(len(value)):
        wrong = bytearray(value)
        wrong[at] ^= 1 << at % 8
        with pytest.raises(RecordError) as refused:
            Sealing(secret).open(b"n", wrong, HEAD)
        assert refused.value.args == (RemoteReason.SEAL,)


@given(st.binary(max_size=200))
def test_bytes_of_others_are_refused(value: bytes) -> None:
    with pytest.raises(RecordError):
        Sealing().open(b"n", value, {})


@pytest.mark.parametrize("theirs, ours", [(b"other", b"secret"), (b"", b"secret"), (b"secret", b"")])
def test_another_secret_is_refused(theirs: bytes, ours: bytes) -> None:
    with pytest.raises(RecordError, match=RemoteReason.SEAL):
        Sealing(ours).open(b"n", sealed(theirs), HEAD)


def test_a_value_that_was_copied_to_another_name_is_refused() -> None:
    with pytest.raises(RecordError, match=RemoteReason.SEAL):
        Sealing(b"s").open(b"m", sealed(b"s", b"n"), HEAD)


@pytest.mark.parametrize("wanted", [{"tokens": 32}, {"kind": "point"}, {"layout": "x"}])
def test_a_head_that_says_something_else_is_refused(wanted: dict[str, object]) -> None:
    with pytest.raises(RecordError, match=RemoteReason.OTHER_LAYOUT):
        Sealing(b"s").open(b"n", sealed(), wanted)


def by_hand(body: bytes, secret: bytes = b"s") -> bytes:
    """Returns a value with a right seal over anything."""
    digest = Sealing(secret)._digest(b"n")
    digest.update(body)
    return body + digest.digest()


@pytest.mark.parametrize(
    "body, reason",
    [
        (b"another\x01" + bytes(4) + b"{}", RemoteReason.OTHER_FORMAT),
        (MAGIC + (1 << 31).to_bytes(4, "little") + b"{}", RemoteReason.TRUNCATED),
        (MAGIC + (2).to_bytes(4, "little") + b"[]", RemoteReason.OTHER_FORMAT),
        (MAGIC + (2).to_bytes(4, "little") + b"\xff\xfe", RemoteReason.OTHER_FORMAT),
        (MAGIC + (9000).to_bytes(4, "little") + b"[" * 9000, RemoteReason.OTHER_FORMAT),
        (b"", RemoteReason.TRUNCATED),
        (bytes(VALUE_BYTES), RemoteReason.TOO_LARGE),
    ],
)
def test_nonsense_with_the_right_seal_is_refused(body: bytes, reason: RemoteReason) -> None:
    with pytest.raises(RecordError, match=reason):
        Sealing(b"s").open(b"n", by_hand(body), {})


def test_a_value_is_at_most_four_mebibytes() -> None:
    room = VALUE_BYTES - SEAL_BYTES - len(MAGIC) - 4 - len(json.dumps(HEAD, separators=(",", ":")))
    assert len(sealed(payload=bytes(room))) == VALUE_BYTES
    with pytest.raises(ValueError, match="more than 4194304"):
        sealed(payload=bytes(room + 1))
    with pytest.raises(ValueError, match="a head of"):
        Sealing().seal(b"n", {"x": "y" * HEAD_BYTES}, [])


BITS = {"F16": (np.uint16, 0x7C00, 16), "BF16": (np.uint16, 0x7F80, 16), "F32": (np.uint32, 0x7F800000, 32)}


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("more", [-1, 0, 1, 5])
@pytest.mark.parametrize("at", [0, 4, 9, -1])
@pytest.mark.parametrize("words", [0, 3])
def test_numbers_that_are_not_finite_are_found(dtype: str, sign: int, more: int, at: int, words: int) -> None:
    """The largest number, infinity, and two of those that are none; anywhere, or in the last word of a row."""
    kind, infinity, n_bits = BITS[dtype]
    negative = 1 << (n_bits - 1)
    numbers = np.resize(np.array([0, 1, infinity - 1, negative, negative | infinity - 1], kind), 18)
    numbers[at] = sign * negative | infinity + more
    n = n_bits // 8
    is_seen = not words or at % len(numbers) * n // 4 % words == words - 1
    data = memoryview(b"x" + numbers.tobytes())[1:]  # not aligned
    if more < 0 or not is_seen:
        require_finite(dtype, data, words)
    else:
        with pytest.raises(RecordError, match=RemoteReason.NOT_FINITE):
            require_finite(dtype, data, words)


def test_codes_and_nothing_are_finite() -> None:
    for dtype, data in (("U32", b"\xff" * 8), ("BOOL", b"\1"), ("F32", b"")):
        require_finite(dtype, data)
