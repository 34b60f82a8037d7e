"""Match types and metadata to subscriptions.

Patterns are those of AMQP topic exchanges over the dotted type: `*` is exactly one word, `#` zero
or more words, and a plain type matches itself. `where` matches metadata, like a headers exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from django_mq.policy.names import check_pattern

#: The prefix of the types of Django tasks. No pattern matches them: each type names its own task.
TASKS = "tasks."

#: Types come from rows, which other programs may write: an unbounded cache would be a leak.
REMEMBERED_TYPES = 1024


class Pattern:
    """One pattern, split into words. Raises InvalidName if it is not a pattern.

    >>> mailer = Pattern("mailer.*.expired")
    >>> mailer.matches("mailer.ad.expired"), mailer.matches("mailer.expired")
    (True, False)
    >>> Pattern("mailer.#").matches("mailer")
    True
    """

    __slots__ = ("_words", "is_plain", "text")

    def __init__(self, text: str) -> None:
        self.text = check_pattern(text)
        self._words = tuple(self.text.split("."))
        #: True without wildcards: the pattern matches exactly one name.
        self.is_plain = not {"*", "#"}.intersection(self._words)

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole dotted `name`.

        A `#` first takes no word, then one more each time that the rest fails. Only the last `#` is
        ever extended, since earlier ones can stay as short as they are. So the work is at most the
        words of the name times the words of the pattern, however many `#` there are.
        """
        if self.is_plain:
            return name == self.text
        pattern, words = self._words, name.split(".")
        at = word = taken = 0
        last_hash = -1
        while word < len(words):
            wanted = pattern[at] if at < len(pattern) else None
            if wanted == "#":
                last_hash, taken = at, word
                at += 1
            elif wanted is not None and wanted in ("*", words[word]):
                at += 1
                word += 1
            elif last_hash >= 0:
                taken += 1
                at, word = last_hash + 1, taken
            else:
                return False
        return all(rest == "#" for rest in pattern[at:])

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"


def plain_types(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns that have no wildcard: each is a type.

    >>> plain_types(["shop.#", "shop.orders.placed"])
    ('shop.orders.placed',)
    """
    return tuple(each for each in patterns if Pattern(each).is_plain)


class Subscription(Protocol):
    """The attributes of a handler that routing reads. `match` is "all" or "any" of `where`."""

    @property
    def name(self) -> str: ...
    @property
    def patterns(self) -> tuple[str, ...]: ...
    @property
    def where(self) -> Mapping[str, Any] | None: ...
    @property
    def match(self) -> str: ...


S = TypeVar("S", bound=Subscription)


@dataclass(frozen=True, slots=True)
class Explanation(Generic[S]):
    """Whether one subscription gets a message, and why."""

    subscription: S
    matches: bool
    reason: str


class RoutingTable(Generic[S]):
    """Subscriptions with their patterns split; the matches of a type are cached.

    Raises InvalidName if a pattern is bad. Thread-safe.
    """

    def __init__(self, subscriptions: Iterable[S]) -> None:
        self._entries = tuple(
            (each, tuple(Pattern(pattern) for pattern in each.patterns)) for each in subscriptions
        )
        self._candidates = lru_cache(REMEMBERED_TYPES)(self._match_patterns)

    def match(self, type: str, metadata: Mapping[str, Any]) -> tuple[S, ...]:
        """Return the subscriptions that get a message, each once, in order."""
        candidates, any_where = self._candidates(type)
        if not any_where:
            return candidates
        return tuple(each for each in candidates if matches_where(each.where, each.match, metadata))

    def takes(self, subscription: S, type: str) -> bool:
        """Return whether a pattern of `subscription` matches the type, for any metadata."""
        return subscription in self._candidates(type)[0]

    def explain(self, type: str, metadata: Mapping[str, Any]) -> tuple[Explanation[S], ...]:
        """Return, for every subscription, whether it gets a message, and why."""
        return tuple(
            Explanation(each, *_explain(each, patterns, type, metadata))
            for each, patterns in self._entries
        )

    def _match_patterns(self, type: str) -> tuple[tuple[S, ...], bool]:
        if type.startswith(TASKS):
            return (), False
        found = tuple(
            each
            for each, patterns in self._entries
            if any(pattern.matches(type) for pattern in patterns)
        )
        return found, any(each.where for each in found)


def matches_where(where: Mapping[str, Any] | None, match: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether metadata has all, or any, of the values in `where`; True without `where`.

    Values are compared as JSON, at every depth: `True` does not equal 1.

    >>> matches_where({"tier": "gold", "vip": True}, "any", {"tier": "gold", "vip": 1})
    True
    >>> matches_where({"tier": "gold", "vip": True}, "all", {"tier": "gold", "vip": 1})
    False
    """
    if not where:
        return True
    held = (_holds(key, value, metadata) for key, value in where.items())
    return any(held) if match == "any" else all(held)


def _holds(key: str, value: object, metadata: Mapping[str, Any]) -> bool:
    return key in metadata and _equal(value, metadata[key])


def _equal(value: object, found: object) -> bool:
    if isinstance(value, dict) and isinstance(found, dict):
        return value.keys() == found.keys() and all(
            _equal(each, found[key]) for key, each in value.items()
        )
    if isinstance(value, list) and isinstance(found, list):
        return len(value) == len(found) and all(map(_equal, value, found))
    return isinstance(found, bool) is isinstance(value, bool) and bool(found == value)


def _explain(
    subscription: Subscription,
    patterns: tuple[Pattern, ...],
    type: str,
    metadata: Mapping[str, Any],
) -> tuple[bool, str]:
    if type.startswith(TASKS):
        if not patterns and type == TASKS + subscription.name:
            return True, "the type names this task"
        return False, f"types that begin with {TASKS} name a task, and no pattern matches them"
    hit = next((pattern.text for pattern in patterns if pattern.matches(type)), None)
    if not patterns:
        return False, "it is a task, which subscribes to nothing"
    if hit is None:
        return False, f"no pattern matches: {', '.join(pattern.text for pattern in patterns)}"
    if not subscription.where:
        return True, f"{hit} matches"
    missed = [
        f"{key}={value!r}"
        for key, value in subscription.where.items()
        if not _holds(key, value, metadata)
    ]
    if matches_where(subscription.where, subscription.match, metadata):
        return True, f"{hit} matches, and so does the metadata ({subscription.match} of where)"
    return False, (
        f"{hit} matches, but the metadata lacks {' or '.join(missed)}"
        f" ({subscription.match} of where is wanted)"
    )
