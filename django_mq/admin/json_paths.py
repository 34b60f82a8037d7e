"""Searches in payload and metadata by path: `payload.user.id:7`, `metadata.tenant:acme`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from django.db.models import F, Func, Q, TextField, Value
from django.db.models.lookups import Exact

from django_mq.policy.column_bounds import MAX_NAME
from django_mq.queues.redaction import REDACTED, redacted

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
