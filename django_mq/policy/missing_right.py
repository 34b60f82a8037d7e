"""Tell a right that a login lacks from a refusal that is about one row."""

from __future__ import annotations

#: SQLSTATE insufficient_privilege.
_REFUSED = "42501"
#: The source files of the server in which it checks rights: of nextval() in the second. Row-level
#: security is not checked there.
_CHECKS = {"aclchk.c", "sequence.c"}


def is_missing_right(error: BaseException) -> bool:
    """Return whether a login lacks a right that the statement itself needs, whatever the rows.

    The server's text then names a table or a sequence, and quotes nothing. A trigger may raise the
    same SQLSTATE because of a row, or lack a right of its own.

    >>> is_missing_right(ValueError())
    False
    """
    return any(map(_is_refused_by_acl, (error, error.__cause__)))


def name_roles(error: BaseException, roles: str) -> None:
    """Add a note with the `roles` that a login needs to `error`, if it lacks a right."""
    if is_missing_right(error):
        error.add_note(
            f"The login needs the role {roles}: see 'Database roles' in the documentation"
        )


def _is_refused_by_acl(error: BaseException | None) -> bool:
    if getattr(error, "sqlstate", None) != _REFUSED:
        return False
    details = getattr(error, "diag", None)
    in_function = getattr(details, "context", None) is not None
    return getattr(details, "source_file", None) in _CHECKS and not in_function
