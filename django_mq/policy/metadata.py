"""The rule for metadata that producers pass: a dict of texts, without the keys of django_mq."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django_mq.exceptions import InvalidOption
from django_mq.policy.column_bounds import MAX_NAME
from django_mq.values import short_repr

#: The prefix of metadata keys that only django_mq writes.
RESERVED = "mq."
#: Bytes for the package's own entries, beyond the limit on the producer's.
MAX_ADDED = 1024


def check_metadata(metadata: object, *, stored: bool = False) -> dict[str, Any]:
    """Return a copy of `metadata`, empty for None; raise InvalidOption if its keys are not allowed.

    `stored`: as it is in a row, where django_mq has entries of its own.

    >>> check_metadata(None), check_metadata({"tier": "gold"})
    ({}, {'tier': 'gold'})
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise InvalidOption(f"metadata must be a dict, not {type(metadata).__name__}")
    for key in metadata:
        if not isinstance(key, str):
            raise InvalidOption(f"metadata has the key {short_repr(key)}: use only str keys")
        if not stored and key.startswith(RESERVED):
            raise InvalidOption(
                f"metadata has the key {key[:MAX_NAME]!r}: keys that begin with {RESERVED} are"
                " reserved, so omit them, also when you pass on a delivery's metadata"
            )
    return dict(metadata)
