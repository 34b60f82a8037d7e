"""The base of all pages: read-only unless a subclass says otherwise, with bounded queries."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, cast

from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.models import LogEntry
from django.contrib.admin.views.main import ChangeList
from django.db import DatabaseError
from django.db.models import Model, Q, QuerySet, TextField
from django.db.models.functions import Cast, Now
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from django_mq import queues
from django_mq.admin.bounds import (
    LOCKED,
    BoundedChangeList,
    CappedPaginator,
    TookTooLong,
    answer_read_only,
    limit_rendering,
    limited,
    limited_statements,
    reporting_timeouts,
)
from django_mq.admin.message_actions import MESSAGE_ACTIONS, MessageAction, OfferedActions
from django_mq.admin.own_pages import OwnPagesAdmin
from django_mq.admin.scope import QueueScopeMixin
from django_mq.admin.texts import link
from django_mq.conf import alias_of
from django_mq.models import QueuedMessage
from django_mq.policy.column_bounds import MAX_NAME, id_of


class ActionForm(helpers.ActionForm):
    """The stock form. Unfold shows its button only if Alpine.js knows the chosen action."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["action"].widget.attrs["x-model"] = "action"


class ReadOnlyAdmin(QueueScopeMixin, OwnPagesAdmin):
    """The base of all pages: the user's queues, bounded queries, and forms that change nothing.

    Subclasses add what may be changed: views of their own, with their own permissions, or for
    schedules the stock forms.
    """

    action_form = ActionForm
    actions_on_bottom = False
    change_list_template = "admin/django_mq/folded_list.html"
    list_max_show_all = 0
    ordering = ("-pk",)
    paginator = CappedPaginator
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False
    sortable_by = ()

    #: Columns by whose exact value the URL may filter. The stock admin would answer
    #: `?payload__password__startswith=a`, which reveals a payload letter by letter.
    exact_lookups: tuple[str, ...] = ()

    #: Columns whose values a search compares with its text, and with its number.
    searched_texts: tuple[str, ...] = ()
    searched_ids: tuple[str, ...] = ("pk",)

    class Media:
        css = {"all": ("django_mq/admin.css",)}

    @property
    def alias(self) -> str:
        """The database of the messages."""
        return alias_of(None)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows that the user may see, each with `now`, the database's time."""
        rows = super().get_queryset(request).using(self.alias)
        return self.scoped(request, rows.annotate(now=Now()))

    def stored_json(self, row: Model, column: str, **others: Any) -> str | None:
        """Return a JSON column as text, since the driver cannot decode every stored document.

        `others` are columns that identify a row whose primary key is not unique.
        """
        rows = type(row)._default_manager.using(self.alias).filter(pk=row.pk, **others)
        text: str | None = rows.values_list(Cast(column, TextField()), flat=True).first()
        return text

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the row; an impossible key is not looked up."""
        if len(object_id) > MAX_NAME or "\x00" in object_id:
            return None
        return super().get_object(request, object_id, from_field)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find the rows that meet `search_condition()`; no column contains a NUL."""
        term = search_term.strip()
        if not term:
            return queryset, False
        if "\x00" in term:
            return queryset.none(), False
        return queryset.filter(self.search_condition(request, term)), False

    def search_condition(self, request: HttpRequest, term: str) -> Q:
        """Return the condition of a search for `term`."""
        return self.text_condition(request, term) | self.id_condition(term)

    def text_condition(self, request: HttpRequest, term: str) -> Q:
        """Return the condition that a searched text is `term`."""
        wanted = Q(pk__in=())
        for column in self.searched_texts:
            wanted |= Q(**{column: term})
        return wanted

    def id_condition(self, term: str) -> Q:
        """Return the condition that a searched id is `term`, with or without `#`."""
        wanted = Q(pk__in=())
        if (id := id_of(term.removeprefix("#"))) is not None:
            for column in self.searched_ids:
                wanted |= Q(**{column: id})
        return wanted

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Allow the filters of the page, and exact values of public columns."""
        fields = [each[0] if isinstance(each, tuple) else each for each in self.list_filter]
        offered = [
            name
            for each in fields
            for name in getattr(each, "parameter_names", [getattr(each, "parameter_name", each)])
        ]
        return lookup.removesuffix("__exact") in (*self.exact_lookups, *offered)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return all fields of the page, which are all read-only."""
        return [
            name for _, options in self.get_fieldsets(request, obj) for name in options["fields"]
        ]

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def may_see_payloads(self, request: HttpRequest) -> bool:
        """Return whether the user may see payloads, metadata, error texts and results."""
        return self._has_right(request, "view_payload")

    def may_see_messages(self, request: HttpRequest) -> bool:
        """Return whether the user may see the list of messages."""
        return self._has_right(request, "view_queuedmessage")

    def may(self, request: HttpRequest, action: MessageAction) -> bool:
        """Return whether the user may see messages and perform `action` on them."""
        return self.may_see_messages(request) and self._has_right(request, action.permission)

    def offered(self, request: HttpRequest, state: str) -> OfferedActions:
        """Return the actions that the user may perform on messages in `state`, with URLs."""
        return [
            (each, url)
            for each in MESSAGE_ACTIONS.values()
            if state in each.states
            and self.may(request, each)
            and (url := self.url(QueuedMessage, "action", each.name))
        ]

    def messages_url(self, request: HttpRequest, **query: object) -> str:
        """Return the URL of the list of messages, empty if the user may not see it."""
        if not self.may_see_messages(request):
            return ""
        return self.url(QueuedMessage, "changelist", **query)

    def seen_queues(self, request: HttpRequest) -> list[str]:
        """Return the known queues that the user may see, sorted; read once per request."""
        found: list[str] | None = getattr(request, "mq_seen_queues", None)
        if found is None:
            known = queues.names(using=self.alias)
            found = [name for name in known if self.may_see(request, name)]
            request.mq_seen_queues = found  # type: ignore[attr-defined]
        return found

    def _has_right(self, request: HttpRequest, codename: str) -> bool:
        return request.user.has_perm(f"django_mq.{codename}")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return BoundedChangeList

    def get_changelist_instance(self, request: HttpRequest) -> ChangeList:
        """Return the list with its rows, read within the time limits."""
        with limited_statements(self.alias):
            found = super().get_changelist_instance(request)
            if request.method == "GET":
                self.read_rows(request, found)
            return found

    def read_rows(self, request: HttpRequest, found: ChangeList) -> None:
        """Read the rows of a list, and what is shown beside them, within the time limits."""
        len(found.result_list)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list; a query that takes too long ends in a hint to filter."""
        try:
            context = {"title": capfirst(self.opts.verbose_name_plural), **(extra_context or {})}
            with reporting_timeouts():
                return super().changelist_view(request, context)
        except TookTooLong as error:
            if request.method in ("GET", "HEAD") and not request.GET:
                return self.show_busy(request)  # there is no filter to leave out
            return self.give_up(request, error)
        except DatabaseError as error:
            return answer_read_only(self, request, error)

    @limited
    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Show one row."""
        response = super().changeform_view(request, *args, **kwargs)
        return limit_rendering(self, request, response)

    @limited
    def delete_view(self, *args: Any, **kwargs: Any) -> Any:
        """Ask whether to delete one row, on the pages that allow it."""
        return super().delete_view(*args, **kwargs)

    @limited
    def history_view(self, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show what users have done to one row."""
        return super().history_view(*args, **kwargs)

    def give_up(self, request: HttpRequest, error: TookTooLong) -> HttpResponse:
        """Report why the query failed, and redirect to the list without filters."""
        if error.is_locked_out:
            text = (
                f"{LOCKED} Nothing was changed. mq_doctor names a session that has locked a table."
            )
        elif error.is_conflict:
            text = (
                "The server cancelled the query; nothing was changed. It may be a standby that"
                " cancels queries to replay changes. Try again in a moment."
            )
        else:
            text = (
                "The query took too long and was cancelled; nothing was changed. Filter by queue"
                " first, or search for an exact id."
            )
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(self.url(self.model, "changelist"))

    def show_busy(self, request: HttpRequest, *, is_read_only: bool = False) -> HttpResponse:
        """Report with status 503 that the database gave no answer to the page, or is read only."""
        title = "The database is read-only" if is_read_only else "The database is busy"
        posted = request.method == "POST"
        page = self.show_page(request, "busy", title, posted=posted, is_read_only=is_read_only)
        page.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return page

    def log(self, request: HttpRequest, rows: Sequence[Model], flag: int, note: str) -> None:
        """Log the user's change of `rows`; call it in the transaction of the change."""
        LogEntry.objects.log_actions(
            user_id=cast(int, request.user.pk),
            queryset=cast("QuerySet[Model]", rows),
            action_flag=flag,
            change_message=note,
        )

    def message_url(self, request: HttpRequest, id: int) -> str:
        """Return the URL of a message's page, empty if the user may not see it."""
        return self.url(QueuedMessage, "change", id) if self.may_see_messages(request) else ""

    def message_link(self, id: int) -> SafeString | str:
        """Return the number of a message as a link to its page."""
        return link(self.url(QueuedMessage, "change", id), f"#{id}")
