"""The layout: what the records of a namespace are made of, and whether one is made of that.

- A range has the arrays of every layer whose KV can be cut at any token. A point has the state of every leaf: see
  `docs/disk-format.md` for how that is described.
- A layout is described in values that JSON has: a cache describes its model's, and `about.json` its namespace's. So
  records can be compared without the model.
- A record whose kind the layout does not describe is not compared: see `describes`.

No MLX in this file.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import PARTED, TYPE_CODES, Content, Tensor, What, range_tensors
from onefold.errors import RecordError

ENTRIES = "entries"
"""In a shape: as many as a window, or a chunk, has at the leaf's end."""
_NONSENSE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


class Layout:
    def __init__(self, ranges: Any, points: Any) -> None:
        """As `about.json` has them: `layout` and `points`; None where one is missing."""
        self._ranges, self._points = ranges, points

    @classmethod
    def of(cls, about: dict[str, Any]) -> Layout:
        return cls(about.get("layout"), about.get("points"))

    def describes(self, what: What) -> bool:
        """Whether the layout says what such a record is made of."""
        if what is What.POINT:
            return isinstance(self._points, list)
        return _range_tensors(self._ranges, 1) is not None

    @property
    def has_points(self) -> bool:
        """Whether there may be checkpoints."""
        return not isinstance(self._points, list) or any(leaf.get("slots") for leaf in self._points)

    def are_windows(self, leaves: list[Any]) -> bool:
        """Whether a point with these leaves consists of windows alone."""
        if not isinstance(self._points, list) or len(leaves) != len(self._points) or all(x is None for x in leaves):
            return False
        return all(x is None or _is_window(y) for x, y in zip(leaves, self._points, strict=True))

    def require(self, content: Content) -> None:
        """Raises RecordError if a record's tensors are not what this layout says, in names, order, types or shapes."""
        if content.what is What.POINT:
            self._require_point(content)
        elif content.tensors:
            expected = _range_tensors(self._ranges, len(content.tokens))
            if expected is not None and content.tensors != expected:
                raise RecordError(DiskReason.OTHER_LAYOUT)

    def _require_point(self, content: Content) -> None:
        try:
            state = json.loads(content.state)
            position, leaves = int(state["position"]), list(state["leaves"])
            named = [name for i, leaf in enumerate(leaves) if leaf is not None for name in _slots(i, leaf)]
        except _NONSENSE as error:
            raise RecordError(DiskReason.NO_HEADER) from error
        if named != [t.name for t in content.tensors]:
            raise RecordError(DiskReason.NO_HEADER)
        if position != content.start:
            raise RecordError(DiskReason.OTHER_LAYOUT)
        if not self.describes(What.POINT):
            return
        tensors = {t.name: t for t in content.tensors}
        try:
            fit = len(leaves) == len(self._points) and all(
                _leaf_fits(i, leaf, described, tensors, content)
                for i, (leaf, described) in enumerate(zip(leaves, self._points, strict=True))
            )
        except _NONSENSE as error:
            raise RecordError(DiskReason.OTHER_LAYOUT) from error
        if not fit:
            raise RecordError(DiskReason.OTHER_LAYOUT)


def _slots(i: int, leaf: dict[str, Any]) -> list[str]:
    return [f"state.{i}.{j}" for j, is_used in enumerate(leaf["slots"]) if is_used]


def _range_tensors(layout: Any, n_tokens: int) -> tuple[Tensor, ...] | None:
    """Returns the tensors of a range of so many tokens; None if the layout does not say."""
    try:
        described = [[(int(h), int(d), str(t).rpartition(".")[2]) for h, d, t in arrays] for arrays in layout]
        return range_tensors(described, n_tokens)
    except (TypeError, ValueError, KeyError):
        return None


def _leaf_fits(i: int, leaf: Any, described: dict[str, Any], tensors: dict[str, Tensor], content: Content) -> bool:
    if leaf is None:
        return bool(described["in_ranges"])
    if content.version == PARTED:
        return _parts_fit(i, leaf, described, tensors, is_whole=not content.after)
    entries = _entries(leaf, described)
    if entries is None:
        return False
    slots = described["slots"]
    if isinstance(slots, dict):  # by the names of attributes, those that are arrays
        slots = [slots[name] for name in leaf["names"]]
    if len(slots) != len(leaf["slots"]):
        return False
    found = (tensors.get(f"state.{i}.{j}") for j in range(len(slots)))
    return all(_is_one_of(tensor, forms, entries) for tensor, forms in zip(found, slots, strict=True))


def _parts_fit(
    i: int, leaf: dict[str, Any], described: dict[str, Any], tensors: dict[str, Tensor], *, is_whole: bool
) -> bool:
    """Whether a leaf is a window in parts, each of them as long as it says, up to the leaf's end."""
    entries, parts, forms = _entries(leaf, described), [(int(a), int(b)) for a, b in leaf["runs"]], described["slots"]
    if not _is_window(described) or entries is None or not parts or len(leaf["slots"]) != len(forms) * len(parts):
        return False
    begin, end = int(leaf["end"]) - entries, int(leaf["end"])
    edges = [(a, b) for (_, a), (b, _) in itertools.pairwise(parts)]
    if any(a >= b for a, b in parts) or any(a != b for a, b in edges) or parts[-1][1] != end:
        return False
    if parts[0][0] < begin or (is_whole and parts[0][0] != begin):
        return False
    return all(
        _is_one_of(tensors.get(f"state.{i}.{r * len(forms) + j}"), form, b - a)
        for r, (a, b) in enumerate(parts)
        for j, form in enumerate(forms)
    )


def _is_window(described: dict[str, Any]) -> bool:
    """Whether the leaf's entries are those of consecutive tokens, and never in ranges."""
    if described["in_ranges"]:
        return False
    return "chunk" in described or ("window" in described and described["window"][0] == 0)


def _entries(leaf: dict[str, Any], described: dict[str, Any]) -> int | None:
    """How many entries the leaf's arrays have; None if it is not such a leaf."""
    extra, end = [int(x) for x in leaf["extra"]], int(leaf["end"])
    if "window" in described:
        keep, size = described["window"]
        return min(end, size) if extra == [keep, size] and end > 0 else None
    if "chunk" in described:
        size, begin = extra
        return end - begin if size == described["chunk"] and 0 < end - begin <= size and begin >= 0 else None
    return 0 if not extra else None


def _is_one_of(tensor: Tensor | None, forms: list[Any], entries: int) -> bool:
    if tensor is None:
        return None in forms
    return any(form is not None and _is_of(tensor, form, entries) for form in forms)


def _is_of(tensor: Tensor, form: list[Any], entries: int) -> bool:
    dtype, shape = form
    if tensor.dtype != TYPE_CODES.get(dtype) or len(tensor.shape) != len(shape):
        return False
    wanted = [entries if n == ENTRIES else n for n in shape]
    return all(n is None or n == found for n, found in zip(wanted, tensor.shape, strict=True))
