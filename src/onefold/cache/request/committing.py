"""Which tokens a commit may store: those that the layers were fed, and hold now."""

from __future__ import annotations

from typing import Any

from onefold.cache.memory.tokens import Tokens, as_tokens_or_none, common_length
from onefold.cache.request.hold import Hold
from onefold.errors import CommitError
from onefold.sizes import show_count


def fed(hold: Hold) -> Tokens:
    """The tokens that every model's layers were fed and hold now. Waits for forwards that are under way."""
    if not hold.watchers:
        return hold.tokens[:0]
    known = [w.fed.tokens()[: w.position] for w in hold.watchers]
    shortest = min(known, key=len)
    return shortest[: min(common_length(shortest, other) for other in known)]


def agreement(hold: Hold, tokens: Any) -> int:
    """How many of `tokens`, from the first on, the layers were fed and hold now: as many as can be committed."""
    found = as_tokens_or_none(tokens)
    held = [(w, found[: w.position]) for w in hold.watchers]
    return min((w.fed.agreement(h) if w.is_watched else len(h) for w, h in held), default=0)


def check(hold: Hold, tokens: Tokens) -> None:
    """Raises CommitError, with the first position, if the layers were fed other tokens than these, or fewer."""
    shared = min(len(tokens), len(hold.tokens), hold.rewound)
    same = common_length(tokens[:shared], hold.tokens[:shared])
    if same < shared:
        given, leased = int(tokens[same]), int(hold.tokens[same])
        raise CommitError(f"token {same} of the commit is {given}, but the lease was opened with {leased}")
    if hold.watchers and len(tokens) > hold.watchers[0].position:
        committed = show_count(len(tokens), "token")
        raise CommitError(f"{committed} committed, but the layers hold {hold.watchers[0].position}")
    for watcher in (w for w in hold.watchers if w.is_watched):
        held = tokens[: watcher.position]
        same = watcher.fed.agreement(held)
        if same < len(held):
            fed = watcher.fed.tokens()
            what = (
                f"the layers were fed {int(fed[same])} there"
                if same < len(fed)
                else ("what the layers were fed there is not known: call the model itself, with tokens")
            )
            raise CommitError(
                f"token {same} of the commit is {int(held[same])}, but {what}: commit lease.fed(), or nothing "
                "for all of it"
            )
