"""CHECK constraints: times within the years that Python knows, durations, JSON types.

Other programs may also write rows, and a row that Python cannot read must not stop a worker.
"""

from __future__ import annotations

from datetime import timedelta

from django.db.models import BooleanField, CheckConstraint, F, Func, Q
from django.db.models.functions import Greatest, Least
from django.db.models.lookups import GreaterThanOrEqual, LessThanOrEqual

from django_mq.policy.column_bounds import FIRST_TIME, LAST_TIME, MAX_SPAN


def times_in_range(name: str, *columns: str) -> CheckConstraint:
    """Return a CHECK that each column is null, or between FIRST_TIME and LAST_TIME."""
    if len(columns) == 1:
        return CheckConstraint(name=name, condition=Q(**{f"{columns[0]}__range": _ALL_TIMES}))
    # Shorter than one range per column, since least() and greatest() ignore nulls.
    return CheckConstraint(
        name=name,
        condition=Q(
            GreaterThanOrEqual(Least(*columns), FIRST_TIME),
            LessThanOrEqual(Greatest(*columns), LAST_TIME),
        ),
    )


def span_in_range(name: str, column: str) -> CheckConstraint:
    """Return a CHECK that a duration is from zero to MAX_SPAN."""
    return CheckConstraint(name=name, condition=Q(**{f"{column}__range": (timedelta(0), MAX_SPAN)}))


def has_json_type(name: str, **types: str) -> CheckConstraint:
    """Return a CHECK that each column has JSON of the given type: array, object."""
    condition = Q()
    for column, type in types.items():
        template = f"jsonb_typeof(%(expressions)s) = '{type}'"
        condition &= Q(Func(F(column), template=template, output_field=BooleanField()))
    return CheckConstraint(name=name, condition=condition)


_ALL_TIMES = (FIRST_TIME, LAST_TIME)
