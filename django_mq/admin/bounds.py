"""Lists that stay fast with millions of rows: counts, pages and statement times are limited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from django.conf import settings
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Page, Paginator
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.backends.utils import CursorWrapper
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from psycopg.errors import LockNotAvailable, QueryCanceled, SerializationFailure

from django_mq.queues import transactions
from django_mq.store import limits
from django_mq.store.server_errors import is_read_only

if TYPE_CHECKING:
    StockPaginator = Paginator[Any]
else:
    StockPaginator = Paginator

View = TypeVar("View", bound=Callable[..., HttpResponseBase])

#: Counts and pages stop here; filters find the rows beyond.
MAX_COUNT = 10_000
#: Seconds that one statement of a list may take.
STATEMENT_SECONDS = 5
#: The methods of requests that change nothing.
READS = ("GET", "HEAD")
#: The notice of a change that waited too long for a lock.
LOCKED = "Another session holds a lock. Try again in a moment."


class TookTooLong(OperationalError):
    """A statement, or a wait for a lock, exceeded its time limit, or was in a conflict."""

    @property
    def is_locked_out(self) -> bool:
        """Whether it was a wait for a lock."""
        return isinstance(self.__cause__ and self.__cause__.__cause__, LockNotAvailable)

    @property
    def is_conflict(self) -> bool:
        """Whether the server cancelled the statement, as a standby does to replay changes."""
        return isinstance(self.__cause__ and self.__cause__.__cause__, SerializationFailure)


def _limits() -> limits.Limits:
    return limits.Limits(STATEMENT_SECONDS, 1.0)


@contextmanager
def reporting_timeouts() -> Iterator[None]:
    """Raise TookTooLong for the database's error."""
    try:
        yield
    except OperationalError as error:
        if isinstance(error.__cause__, QueryCanceled | LockNotAvailable | SerializationFailure):
            raise TookTooLong(*error.args) from error
        raise


@contextmanager
def limited_statements(alias: str) -> Iterator[None]:
    """Raise TookTooLong if a statement takes `STATEMENT_SECONDS`, or a lock one second."""
    with reporting_timeouts(), transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            limits.apply(cursor, _limits())
        yield


@contextmanager
def writing(alias: str) -> Iterator[CursorWrapper]:
    """Like `transactions.writing()`; raises TookTooLong if a lock is held for over a second."""
    with reporting_timeouts(), transactions.writing(alias) as cursor:
        yield cursor


@contextmanager
def limited_throughout(alias: str) -> Iterator[None]:
    """Limit each statement of the block like `limited_statements()`, in no common transaction.

    For a view that reads and then changes: its changes are committed where it commits them.
    """
    if connections[alias].in_atomic_block:  # that of the request
        with limited_statements(alias):
            yield
        return
    settings = f"set local jit = off; {limits.set_local(_limits())}"
    with reporting_timeouts(), transactions.limited_throughout(alias, settings):
        yield


def answer_read_only(page: Any, request: HttpRequest, error: DatabaseError) -> HttpResponse:
    """Return the page for a change that a read-only server refused; raise any other error."""
    if not is_read_only(error):
        raise error
    response: HttpResponse = page.show_busy(request, is_read_only=True)
    return response


def limited_posts(page: Any, view: View) -> View:
    """Limit the statements of a bound view when it changes something, like `limited()`."""

    @wraps(view)
    def bounded(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if request.method in READS:
            return view(request, *args, **kwargs)
        return _limited_post(page, request, partial(view, request, *args, **kwargs))

    return cast("View", bounded)


def _limited_post(page: Any, request: HttpRequest, view: Callable[[], Any]) -> Any:
    if hasattr(request, "mq_limited"):
        return view()
    request.mq_limited = True  # type: ignore[attr-defined]
    try:
        with limited_throughout(page.alias):
            return view()
    except TookTooLong:
        return page.show_busy(request)
    except DatabaseError as error:
        return answer_read_only(page, request, error)


def redirects_on_timeout(view: View) -> View:
    """Let a view whose statement runs out of time redirect with `ReadOnlyAdmin.give_up()`."""

    @wraps(view)
    def bounded(page: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            with reporting_timeouts():
                return view(page, request, *args, **kwargs)
        except TookTooLong as error:
            return page.give_up(request, error)

    return cast("View", bounded)


def limited(view: View) -> View:
    """Limit the statements of a view, and answer `show_busy()` at the limit."""

    @wraps(view)
    def bounded(page: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if request.method not in READS:
            return _limited_post(page, request, partial(view, page, request, *args, **kwargs))
        if hasattr(request, "mq_limited"):
            return view(page, request, *args, **kwargs)
        request.mq_limited = True  # type: ignore[attr-defined]  # a view may call its base's
        try:
            with limited_statements(page.alias):
                try:
                    return view(page, request, *args, **kwargs)
                except (Http404, PermissionDenied) as error:
                    refused = error  # whatever a project's hook has recorded about it is committed
        except TookTooLong:
            return page.show_busy(request)
        raise refused

    return cast("View", bounded)


def limit_rendering(page: Any, request: HttpRequest, response: Any) -> Any:
    """Return `response`, whose template reads rows, with limits for its rendering, too.

    Django renders it after the view, so a subclass may still change its context.
    """
    if not hasattr(response, "render"):
        return response
    render = response.render

    def limited_render() -> Any:
        del response.render
        try:
            with limited_statements(page.alias):
                return render()
        except TookTooLong:
            return page.show_busy(request).render()

    response.render = limited_render
    return response


class AtLeast(int):
    """The number at which a count stopped: `10,000+` as text, an int in computations."""

    def __str__(self) -> str:
        # Django parses this text to insert the project's own separators.
        return int.__repr__(self) if settings.USE_THOUSAND_SEPARATOR else f"{int(self) - 1:,}+"


class Estimate(int):
    """A number that the planner estimated: `~1,200,000` as text, an int in computations."""

    def __str__(self) -> str:
        return f"~{int(self):,}"


class CappedPaginator(StockPaginator):
    """Pages of the first `MAX_COUNT` rows; one query finds their number and their keys."""

    @property
    def rows(self) -> QuerySet[Any]:
        return cast("QuerySet[Any]", self.object_list)

    @cached_property
    def ids(self) -> list[Any]:
        """The primary keys of the first `MAX_COUNT` + 1 rows."""
        return list(self.rows.values_list("pk", flat=True)[: MAX_COUNT + 1])

    @cached_property
    def count(self) -> int:
        return AtLeast(MAX_COUNT + 1) if len(self.ids) > MAX_COUNT else len(self.ids)

    @cached_property
    def num_pages(self) -> int:
        return max(1, -(-min(self.count, MAX_COUNT) // self.per_page))

    def page(self, number: int | str) -> Page[Any]:
        """Return a page by its keys; a row that was removed since is missing."""
        number = self.validate_number(number)
        ids = self.ids[:MAX_COUNT][(number - 1) * self.per_page : number * self.per_page]
        return Page(self.rows.filter(pk__in=ids), number, self)


class BoundedChangeList(ChangeList):
    """A list that queries its rows once, even when one page holds them all."""

    @property
    def boxes(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The forms of filters with text boxes: the id of each, and the parameters it keeps."""
        return [
            (f"mq-filter-{own[0]}", [each for each in self.params.items() if each[0] not in own])
            for own in (getattr(spec, "typed", ()) for spec in self.filter_specs)
            if own
        ]

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        """Leave out empty boxes; refuse NUL characters, which the database would refuse."""
        found: dict[str, Any] = super().get_filters_params(params)
        for spec in self.list_filter:
            name = getattr(spec, "parameter_name", "")
            if getattr(spec, "ignores_empty", False) and found.get(name, [""])[-1] == "":
                found.pop(name, None)
        if any("\x00" in value for values in found.values() for value in values):
            raise IncorrectLookupParameters
        return found

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if not self.multi_page:
            self.result_list = self.paginator.page(1).object_list
