"""The queues that a worker serves, and names and patterns that may be misspelled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from shlex import quote

from django_mq import handlers
from django_mq.conf import Settings
from django_mq.management.output import table
from django_mq.policy.routing import Pattern
from django_mq.queues.known_queues import unknown_queue_warning

#: The maximum numbers of types and of queues shown per handler, or named in a warning.
MAX_PATTERNS, MAX_QUEUES = 5, 5


def served(patterns: Iterable[str], settings: Settings) -> str:
    """Return a table of the queues that `patterns` name, and of their handlers here.

    A handler stands there once, with its queues in one cell: a task may run in dozens of them.
    """
    asked = [Pattern(each) for each in patterns]
    rows = []
    for queues, *cells in _subscriptions(settings):
        shown = [name for name in queues if any(each.matches(name) for each in asked)]
        if shown:
            rows.append((_listed(shown, MAX_QUEUES), *cells))
    if not rows:
        return "No handler here takes messages of these queues."
    return table(("queue", "handler", "types"), sorted(rows))


def _subscriptions(settings: Settings) -> Iterator[tuple[Sequence[str], str, str]]:
    """Yield each handler of this process with its queues and types, then the other queues."""
    found: set[str] = set()
    for each in handlers.all_handlers():
        queues = handlers.allowed_queues(each, settings)
        found.update(queues)
        yield queues, each.name, _listed(each.patterns, MAX_PATTERNS) or "(a task)"
    for queue in {settings.default_queue, *settings.queues} - found:
        yield (queue,), "-", "-"


def _listed(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (", ..." if names[most:] else "")


def unserved_warning(names: Sequence[str]) -> str:
    """Return a warning about queues with waiting messages that no live worker claims from."""
    more = f" and {len(names) - MAX_QUEUES:,} more" if len(names) > MAX_QUEUES else ""
    return (
        f"Messages wait that no live worker claims, in {', '.join(names[:MAX_QUEUES])}{more}:"
        " mq_doctor says what to do."
    )


def unmatched(pattern: str, known: Collection[str]) -> str:
    """Return a warning if `pattern`, which may be a plain name, matches no known queue.

    >>> unmatched("mial.*", ["mail.in", "default"])
    "no queue that has handlers here or messages matches 'mial.*': did you mean 'mail.*'?"
    >>> unmatched("mail.*", ["mail"])
    "no queue that has handlers here or messages matches 'mail.*': did you mean 'mail.#'?"
    >>> unmatched("mail.*", ["mail.in"])
    ''
    """
    asked = Pattern(pattern)
    if asked.is_plain:
        return unknown_queue_warning(pattern, known)
    if any(map(asked.matches, known)):
        return ""
    patterns = {each for name in known for each in _patterns_of(name)}
    near = _hint(get_close_matches(pattern, patterns, 1))  # a wildcard is like any other word
    return f"no queue that has handlers here or messages matches {pattern!r}{near}"


def separated(options: Iterable[str]) -> str:
    """Return a hint if an option lists several queues, as workers of other packages take them.

    >>> separated(["work,mail.*"]), separated(["work"])
    ("; repeat the option: --queue work --queue 'mail.*'", '')
    """
    listed = [each.strip() for option in options if "," in option for each in option.split(",")]
    words = " ".join(f"--queue {quote(each)}" for each in listed if each)
    return f"; repeat the option: {words}" if words else ""


def _hint(near: list[str]) -> str:
    return f": did you mean {near[0]!r}?" if near else ""


def _patterns_of(name: str) -> Iterator[str]:
    """Yield the patterns that match `name` with one wildcard.

    >>> sorted(set(_patterns_of("mail.in")))
    ['#', '#.in', '#.mail.in', '*.in', 'mail.#', 'mail.*', 'mail.in.#']
    """
    words = name.split(".")
    for n in range(len(words) + 1):
        yield ".".join([*words[:n], "#"])
        yield ".".join(["#", *words[n:]])
    for n in range(len(words)):
        yield ".".join([*words[:n], "*", *words[n + 1 :]])
