"""The tree of messages that caused one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

#: The maximum length of an alias in a name; the rest is room for an id.
_MAX_ALIAS = 100


def name_in(alias: str, name: str, *, source: str) -> str:
    """Return the name by which `alias` knows a chain or message of the database `source`.

    Each database has its own sequence of ids, so another database names an id with its database.

    >>> name_in("other", "17", source="default")
    'default:17'
    >>> name_in("third", "default:17", source="other"), name_in("default", "default:17", source="x")
    ('default:17', '17')
    """
    whole = name if ":" in name else f"{source[:_MAX_ALIAS]}:{name}"
    home, _, id = whole.rpartition(":")
    return id if home == alias[:_MAX_ALIAS] else whole


class Node(NamedTuple):
    """A message in a tree, `depth` broadcasts below the top."""

    depth: int
    id: int


def tree(causes: Mapping[int, int | None]) -> Iterator[Node]:
    """Yield every message of `causes`, each below its cause and in the order of the ids.

    `causes` maps each message to the id of its cause; None if no handler broadcast it. A cause that
    is not itself in `causes` is also yielded, above its effects. Rows that other programs wrote may
    cause each other in a cycle: these come last, at the top level.

    >>> [tuple(node) for node in tree({1: None, 4: 2, 2: 1, 3: 1, 9: 8})]
    [(0, 1), (1, 2), (2, 4), (1, 3), (0, 8), (1, 9)]
    >>> [tuple(node) for node in tree({1: 2, 2: 1})]
    [(0, 1), (1, 2)]
    """
    effects: dict[int, list[int]] = {}
    tops = set()
    for id, cause in causes.items():
        if cause is None or cause == id:
            tops.add(id)
        else:
            effects.setdefault(cause, []).append(id)
            if cause not in causes:
                tops.add(cause)
    seen: set[int] = set()
    yield from _below(sorted(tops), effects, seen)
    for id in sorted(causes):
        if id not in seen:
            yield from _below([id], effects, seen)


def _below(tops: Iterable[int], effects: Mapping[int, list[int]], seen: set[int]) -> Iterator[Node]:
    stack = [Node(0, id) for id in reversed(list(tops))]
    while stack:
        node = stack.pop()
        if node.id in seen:
            continue
        seen.add(node.id)
        yield node
        under = sorted(effects.get(node.id, ()), reverse=True)
        stack += [Node(node.depth + 1, id) for id in under]
