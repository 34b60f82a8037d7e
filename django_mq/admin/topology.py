"""The page of types and handlers: which handlers get which messages."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import limited
from django_mq.admin.own_pages import own_page
from django_mq.admin.texts import badge, breakable
from django_mq.models import QueueState
from django_mq.states import MessageState

#: The maximum numbers of types (also of tasks) and of handlers; `mq_routes` lists all.
MAX_TYPES, MAX_HANDLERS = 200, 40
#: With more handlers than this, a column for each is wider than a laptop: types are a list.
MAX_COLUMNS = 4


class TopologyAdmin(ReadOnlyAdmin):
    """Adds the page to the pages of queues."""

    @own_page(QueueState, "topology", "topology/")
    @limited
    def topology_view(self, request: HttpRequest) -> HttpResponse:
        """Show types and handlers as a table."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        found = queues.topology(only=self.get_queues(request), using=self.alias)
        shown = found.handlers[:MAX_HANDLERS]
        heard = {name for each in found.types for name in each.handlers}
        return self.show_page(
            request,
            "topology",
            "Types and handlers",
            is_matrix=len(shown) <= MAX_COLUMNS,
            subscribers=[(each, breakable(each.name)) for each in shown],
            types=[
                (
                    each,
                    breakable(each.type),
                    self.messages_url(request, type=each.type),
                    [one.name in each.handlers for one in shown],
                    [one for one in found.handlers if one.name in each.handlers],
                )
                for each in found.types[:MAX_TYPES]
            ],
            idle=[each for each in shown if each.name not in heard],
            held=badge(MessageState.HELD),
            unheard=found.unheard[:MAX_TYPES],
            uncalled=found.uncalled,
            observed=found.observed,
            tasks=found.tasks[:MAX_TYPES],
            more=len(found.types) > MAX_TYPES
            or len(found.handlers) > MAX_HANDLERS
            or len(found.tasks) > MAX_TYPES,
        )
