"""Checks which tokens a commit may store: only those that the layers were fed and hold now."""

from __future__ import annotations

from typing import Any

from onefold.cache.memory.tokens import Tokens, as_tokens_or_none, common_length
from onefold.cache.request.hold import Hold
from onefold.errors import CommitError
from onefold.sizes import show_count


def fed(hold: Hold) -> Tokens:
    """Returns the tokens that every model's layers were fed and hold now. Waits for forwards in progress."""
    if not hold.watchers:
        return hold.tokens[:0]
    known = [w.fed.tokens()[: w.position] for w in hold.watchers]
    shortest = min(known, key=len)
    return shortest[: min(common_length(shortest, other) for other in known)]


def agreement(hold: Hold, tokens: Any) -> int:
    """Returns how many of `tokens`, from the first on, can be committed: the layers were fed them and hold them now."""
    found = as_tokens_or_none(tokens)
    held = [(w, found[: w.position]) for w in hold.watchers]
    return min((w.fed.agreement(h) if w.is_watched else len(h) for w, h in held), default=0)


def check(hold: Hold, tokens: Tokens) -> None:
    """Raises CommitError, with the first position that differs, if the layers were fed other tokens, or fewer."""
    shared = min(len(tokens), len(hold.tokens), hold.rewound)
    same = common_length(tokens[:shared], hold.tokens[:shared])
    if same < shared:
        given, leased = int(tokens[same]), int(hold.tokens[same])
        raise CommitError(f"token {same} of the commit is {given}, but the lease was opened with {leased}")
    if hold.watchers and len(tokens) > hold.watchers[0].position:
        committed = show_count(len(tokens), "token")
        raise CommitError(
            f"{committed} committed, but the layers hold {hold.watchers[0].position}: commit no more than lease.fed()"
        )
    for watcher in (w for w in hold.watchers if w.is_watched):
        held = tokens[: watcher.position]
        same = watcher.fed.agreement(held)
        if same < len(held):
            fed = watcher.fed.tokens()
            what = (
                f"the layers were fed {int(fed[same])} there"
                if same < len(fed)
                else ("it is not known what the layers were fed there: call the model itself, with tokens")
            )
            raise CommitError(
                f"token {same} of the commit is {int(held[same])}, but {what}: commit lease.fed(), or call commit() "
                "without tokens"
            )
