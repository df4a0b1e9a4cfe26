"""The tree of a cache: its nodes have spans and checkpoints."""

from __future__ import annotations

from typing import TypeAlias

from onefold.cache.memory import tree
from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.segment import Span

Node: TypeAlias = tree.Node[Span, Checkpoint]
Tree: TypeAlias = tree.Tree[Span, Checkpoint]
