"""The page on which an operator broadcasts a message: a form, its recipients, and the button."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import messages as notices
from django.contrib.admin.models import ADDITION
from django.core.exceptions import PermissionDenied
from django.core.validators import MinValueValidator
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from django_mq import outbox, queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import LOCKED, TookTooLong, limited, writing
from django_mq.admin.checked_forms import CheckedForm, CheckedTextField, JSONTextField, checked
from django_mq.admin.own_pages import own_page
from django_mq.admin.seen_handlers import did_you_mean
from django_mq.conf import get_settings
from django_mq.exceptions import (
    InvalidName,
    InvalidOption,
    InvalidPayload,
    MQError,
    RoutingError,
)
from django_mq.messages import CopyReceipt, Receipt
from django_mq.messages.classes import class_of_type, message_classes
from django_mq.models import QueuedMessage
from django_mq.policy.column_bounds import MAX_PRIORITY, MIN_PRIORITY
from django_mq.policy.metadata import check_metadata
from django_mq.policy.names import check_key, check_name

Copies = tuple[CopyReceipt, ...]


def _suggesting(name: str) -> forms.TextInput:
    """Return a text box with the suggestions that the page lists under this name."""
    return forms.TextInput(
        {"class": "vTextField", "autocomplete": "off", "list": f"mq-suggest-{name}"}
    )


class BroadcastForm(CheckedForm):
    """The arguments of `broadcast()`; each error is shown at its field."""

    error_fields = {
        RoutingError: "queue",
        InvalidName: "type",
        InvalidPayload: "payload",
        InvalidOption: "after",
    }
    type = CheckedTextField(check_name, "type", widget=_suggesting("type"))
    queue = CheckedTextField(
        check_name,
        "queue",
        required=False,
        widget=_suggesting("queue"),
        help_text="Empty: the queues of the handlers.",
    )
    payload = JSONTextField(
        rows=10, help_text="JSON. If the type has a message class, its fields are checked."
    )
    metadata = JSONTextField(rows=3, help_text="A JSON object; where= of a handler can match it.")
    key = CheckedTextField(check_key, "order key", label="Order key", required=False)
    unique_id = CheckedTextField(
        check_key,
        "unique id",
        required=False,
        help_text="While a message with this id waits or runs, no second one is stored.",
    )
    after = forms.DurationField(
        label="Delay",
        required=False,
        help_text="Seconds, or hours:minutes:seconds.",
        validators=[MinValueValidator(timedelta(0), "A delay cannot be negative.")],
    )
    priority = forms.IntegerField(
        min_value=MIN_PRIORITY, max_value=MAX_PRIORITY, initial=0, help_text="Higher first."
    )

    def clean_metadata(self) -> Any:
        found = self.cleaned_data["metadata"]
        checked(lambda: get_settings().encode_metadata(check_metadata(found)))
        return found

    def clean_payload(self) -> Any:
        found = self.cleaned_data["payload"]
        checked(lambda: get_settings().encode_payload(found))
        if known := class_of_type(self.cleaned_data.get("type", "")):
            checked(lambda: known.load(found, known.version))
        return found

    def options(self) -> dict[str, Any]:
        """Return the arguments of `broadcast()`."""
        known = class_of_type(self.cleaned_data["type"])
        return {**self.cleaned_data, "schema_version": known.version if known else 1}


class BroadcastingAdmin(ReadOnlyAdmin):
    """Adds the page to the pages of messages."""

    def may_broadcast(self, request: HttpRequest) -> bool:
        """Return whether the user may see messages and broadcast new ones."""
        return self.may_see_messages(request) and self._has_right(request, "broadcast_message")

    def broadcast_url(self, request: HttpRequest) -> str:
        """Return the URL of the page, empty if the user may not broadcast."""
        return self.url(QueuedMessage, "broadcast") if self.may_broadcast(request) else ""

    @own_page(QueuedMessage, "broadcast", "broadcast/")
    @limited
    def broadcast_view(self, request: HttpRequest) -> HttpResponse:
        """Show the form, then the recipients; then broadcast, if the recipients are the same."""
        if not self.may_broadcast(request):
            raise PermissionDenied
        posted = request.POST if request.method == "POST" else None
        form = BroadcastForm(posted)
        copies: Copies = ()
        if form.is_valid():
            try:
                receipt, is_sent = self._send(request, form)
                if is_sent:
                    return self._sent(request, receipt)
                copies = receipt.copies
            except MQError as error:
                form.refuse(error)
            except TookTooLong:
                form.add_error(None, LOCKED)
        return self.show_page(
            request,
            "broadcast",
            "Broadcast a message",
            form=form,
            copies=copies,
            reach=_reach(copies),
            did_you_mean=copies
            and did_you_mean(form.cleaned_data["type"], self.get_queues(request)),
            suggestions={"type": self._types(request), "queue": self.seen_queues(request)},
            back=self.url(QueuedMessage, "changelist"),
        )

    def _send(self, request: HttpRequest, form: BroadcastForm) -> tuple[Receipt, bool]:
        """Broadcast the form's message; roll back unless the user has seen its recipients."""
        # The inner block is a savepoint: a rollback leaves the outer one usable.
        with writing(self.alias), transaction.atomic(using=self.alias):
            receipt = outbox.broadcast(**form.options(), using=self.alias)
            for copy in receipt.copies:
                if not self.may_see(request, copy.queue):
                    raise RoutingError(
                        "The message would also reach a queue that you may not see. Choose one of"
                        " your queues."
                    )
            is_seen = "confirmed" in request.POST and request.POST.get("reach") == _reach(
                receipt.copies
            )
            if is_seen:
                ids = [each.id for each in receipt.copies if each.outcome != "duplicate"]
                rows = QueuedMessage.objects.using(self.alias).filter(pk__in=filter(None, ids))
                self.log(request, list(rows.only("pk", "type", "queue")), ADDITION, "Broadcast.")
            else:
                transaction.set_rollback(True, using=self.alias)
        return receipt, is_seen

    def _sent(self, request: HttpRequest, receipt: Receipt) -> HttpResponse:
        """Report the copies, and show the message if there is one."""
        for copy in receipt.copies:
            name = f"Message {copy.id}" if copy.id else "The message"
            where = f"queue {copy.queue}" + (f", handler {copy.handler}" if copy.handler else "")
            if copy.outcome == "duplicate":
                text = f"Not stored: the unique id is taken ({copy.reason or 'waiting'}), {where}."
                self.message_user(request, text, notices.WARNING)
            else:
                self.message_user(request, f"{name}: {copy.outcome}, {where}.", notices.SUCCESS)
        ids = [each.id for each in receipt.copies if each.id is not None]
        page = ("change", ids[0]) if len(ids) == 1 else ("changelist",)
        return HttpResponseRedirect(self.url(QueuedMessage, *page))

    def _types(self, request: HttpRequest) -> list[str]:
        """Return the suggested types: known types, and the types of message classes."""
        found = queues.topology(only=self.get_queues(request), using=self.alias)
        classes = () if self.get_queues(request) is not None else message_classes()
        return sorted({each.type for each in found.types} | {each.type for each in classes})


def _reach(copies: Copies) -> str:
    """Return the recipients of a message as text, to compare with those that the user has seen."""
    return "\n".join(sorted(f"{each.handler} {each.queue} {each.outcome}" for each in copies))
