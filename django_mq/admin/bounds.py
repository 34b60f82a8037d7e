"""Lists that stay quick with millions of rows: counts have an end, and so has every walk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from django.conf import settings
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Page, Paginator
from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet
from django.http import HttpRequest

from django_mq.queues.acting import LOCK_NOT_AVAILABLE

if TYPE_CHECKING:
    StockPaginator = Paginator[Any]
else:
    StockPaginator = Paginator

#: Counting stops here, and so do the pages: what lies behind is found by filters.
MOST = 10_000
#: Seconds that one statement of a list may take.
PATIENCE = 5
QUERY_CANCELED = "57014"

# The state of a message is estimated dear: it would be compiled for a second and run for a
# hundredth of one.
LIMIT_TIME = """
select set_config('jit', 'off', true),
       set_config('statement_timeout', %(milliseconds)s, true),
       set_config('lock_timeout', '1000', true)
"""


@contextmanager
def impatient(alias: str) -> Iterator[None]:
    """Give up a statement that takes longer than `PATIENCE`, or a second for a lock.

    That is an OperationalError, which `ran_out` knows.
    """
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute(LIMIT_TIME, {"milliseconds": str(PATIENCE * 1000)})
        yield


def ran_out(error: OperationalError) -> bool:
    """Return whether a statement was given up because of the time it took."""
    return getattr(error.__cause__, "sqlstate", None) in (QUERY_CANCELED, LOCK_NOT_AVAILABLE)


class AtLeast(int):
    """A number that counting stopped at: `10,000+` in texts, still a number to compute with."""

    def __str__(self) -> str:
        # With separators of its own the project's formats would take the text apart.
        return int.__repr__(self) if settings.USE_THOUSAND_SEPARATOR else f"{int(self) - 1:,}+"


class CappedPaginator(StockPaginator):
    """Pages of the first `MOST` rows; one walk finds how many there are and which."""

    @property
    def rows(self) -> QuerySet[Any]:
        return cast("QuerySet[Any]", self.object_list)

    @cached_property
    def ids(self) -> list[Any]:
        """The primary keys of the rows, one more than `MOST` if there are more."""
        return list(self.rows.values_list("pk", flat=True)[: MOST + 1])

    @cached_property
    def count(self) -> int:
        return AtLeast(MOST + 1) if len(self.ids) > MOST else len(self.ids)

    @cached_property
    def num_pages(self) -> int:
        return max(1, -(-min(self.count, MOST) // self.per_page))

    def page(self, number: int | str) -> Page[Any]:
        """Return a page by the keys that were found; a row that left since is missing."""
        number = self.validate_number(number)
        ids = self.ids[:MOST][(number - 1) * self.per_page : number * self.per_page]
        return Page(self.rows.filter(pk__in=ids), number, self)


class BoundedChangeList(ChangeList):
    """A list that looks for its rows once, also when one page holds them all."""

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        """Refuse what the database would refuse."""
        found: dict[str, Any] = super().get_filters_params(params)
        if any("\x00" in value for values in found.values() for value in values):
            raise IncorrectLookupParameters
        return found

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if not self.multi_page:
            self.result_list = self.paginator.page(1).object_list
