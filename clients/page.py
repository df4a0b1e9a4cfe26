"""Tables, and where docs/clients.md has them: between two comments that name the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "clients.md"


def table(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Returns a table in Markdown. `rows` begins with its head; `numbers` are the columns that are set to the right."""
    head, *rest = rows
    rule = ["---:" if i in numbers else "---" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rest))


def write(name: str, text: str) -> None:
    """Puts the table in the place of the one that the page has. Raises ValueError if the page has no such place."""
    page = PAGE.read_text()
    place = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
    if len(place.findall(page)) != 1:
        raise ValueError(f"{PAGE.name} has no place for the table of {name}: put <!-- {name} --> around it")
    PAGE.write_text(place.sub(lambda found: found[1] + text + found[2], page))
