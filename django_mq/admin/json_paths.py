"""Searches in payload and metadata by path: `payload.user.id:7`, `metadata.tenant:acme`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.db.models import F, Func, Q, TextField, Value
from django.db.models.lookups import Exact

from django_mq.policy.column_bounds import MAX_NAME
from django_mq.queues.redaction import REDACTED, redacted

#: The maximum number of paths that are offered, and of keys in a path.
MAX_PATHS, MAX_PATH_KEYS = 50, 5
_KEY = re.compile(r"[^.:\x00-\x1f\x7f-\x9f]{1,64}")
_FORM = re.compile(r"(payload|metadata)\.([^:]{1,512}):(.{0,512})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class JSONPath:
    """A value, as text, that a document has at a path of keys and list positions."""

    column: str
    path: tuple[str, ...]
    value: str

    @property
    def is_secret(self) -> bool:
        """Whether any key of the path is one whose values are hidden."""
        return any(redacted({key: ""})[key] == REDACTED for key in self.path)

    @property
    def condition(self) -> Q:
        """The condition on the messages. It compares text: `7` finds the number and the string."""
        found = Func(
            F(self.column),
            *map(Value, self.path),
            function="jsonb_extract_path_text",
            output_field=TextField(),
        )
        return Q(Exact(found, Value(self.value)))


def read_path(term: str) -> JSONPath | None:
    """Return the path and the value in a search term, None if the term has another form.

    >>> read_path("payload.user.id:7")
    JSONPath(column='payload', path=('user', 'id'), value='7')
    >>> read_path("shop:payload.user"), read_path("payload.:7")
    (None, None)
    """
    found = _FORM.fullmatch(term)
    if found is None:
        return None
    path = tuple(found[2].split("."))
    if not all(path) or len(path) > MAX_NAME:
        return None
    return JSONPath(found[1], path, found[3].strip())


def paths_in(document: Any, column: str) -> Iterator[str]:
    """Return the paths to the values of a document, without those under a secret key.

    Positions in lists are left out: a search needs the right position, which differs in the next
    row.

    >>> list(paths_in({"user": {"id": 7, "api_token": "x"}, "odd.key": 1, "lines": [1]}, "payload"))
    ['payload.user.id']
    """
    if not isinstance(document, dict):
        return
    covered = redacted(document)
    for key, value in document.items():
        if covered[key] == REDACTED or not _KEY.fullmatch(key):
            continue
        path = f"{column}.{key}"
        if isinstance(value, dict):
            if path.count(".") < MAX_PATH_KEYS:
                yield from paths_in(value, path)
        elif not isinstance(value, list):
            yield path


def most_seen(paths: Iterator[str]) -> list[str]:
    """Return the `MAX_PATHS` most frequent paths, by name, as the beginnings of searches."""
    return sorted(f"{path}:" for path, _times in Counter(paths).most_common(MAX_PATHS))
