"""What has changed between two pictures of the server, so that a viewer gets that alone.

A picture has sections; a section has values by name. Knows nothing of what they mean.
"""

from __future__ import annotations

from typing import Any

Picture = dict[str, dict[str, Any]]


def changes(before: Picture, after: Picture) -> dict[str, Any]:
    """Returns what makes `before` into `after`: `set`, values by section and name, and `gone`, names by section. A
    section without a change is left out. Both pictures have the same sections."""
    put: Picture = {}
    gone: dict[str, list[str]] = {}
    for section, values in after.items():
        old = before[section]
        if changed := {name: v for name, v in values.items() if name not in old or old[name] != v}:
            put[section] = changed
        if left := [name for name in old if name not in values]:
            gone[section] = left
    return {"set": put, "gone": gone}
