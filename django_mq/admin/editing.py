"""The page on which an operator edits a waiting message: payload, due time, priority."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Any

from django import forms
from django.contrib import messages as notices
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import TookTooLong, limited, writing
from django_mq.admin.checked_forms import CheckedForm, JSONTextField, checked
from django_mq.admin.own_pages import own_page
from django_mq.admin.texts import MAX_TEXT
from django_mq.conf import get_settings
from django_mq.conf.local_time import aware
from django_mq.exceptions import InvalidOption, InvalidPayload, MQError
from django_mq.models import QueuedMessage
from django_mq.policy.column_bounds import MAX_PRIORITY, MIN_PRIORITY


class DueField(forms.DateTimeField):
    """A moment; in the hour that is repeated at the end of summer time, the first of the two.

    The stock field refuses both, so a message that is due at that time could not be edited at all.
    """

    def to_python(self, value: Any) -> datetime | None:
        try:
            return super().to_python(value)
        except ValidationError as error:
            found = parse_datetime(value.strip()) if error.code == "ambiguous_timezone" else None
            if found is None:
                raise
            first, second = (timezone.make_aware(found.replace(fold=fold)) for fold in (0, 1))
            if first.utcoffset() <= second.utcoffset():  # type: ignore[operator]
                raise  # the clock skips this time
            return first


class EditForm(CheckedForm):
    """The editable fields of a waiting message. `digest` is the digest of the payload shown."""

    error_fields = {InvalidPayload: "payload", InvalidOption: "due"}
    payload = JSONTextField(rows=14, help_text="JSON. It replaces the whole payload.")
    due = DueField(
        show_hidden_initial=True,
        widget=forms.DateTimeInput({"type": "datetime-local", "step": 1}, "%Y-%m-%dT%H:%M:%S"),
    )
    priority = forms.IntegerField(
        min_value=MIN_PRIORITY,
        max_value=MAX_PRIORITY,
        show_hidden_initial=True,
        help_text="Higher first.",
    )
    digest = forms.CharField(widget=forms.HiddenInput, required=False, max_length=32)

    def clean_payload(self) -> Any:
        found = self.cleaned_data["payload"]
        checked(lambda: get_settings().encode_payload(found))
        return found

    def clean_due(self) -> datetime:
        """Return the due time; with USE_TZ off, Django's field returns a naive one."""
        return aware(self.cleaned_data["due"])

    def changes(self) -> dict[str, Any]:
        """Return the arguments of `queues.edit()`: the values that the user has changed."""
        found = {name: self.cleaned_data[name] for name in self.changed_data if name != "digest"}
        if "payload" in found:
            found["digest"] = self.cleaned_data["digest"]
        return found


class EditingAdmin(ReadOnlyAdmin):
    """Adds the page to the pages of messages."""

    def may_edit(self, request: HttpRequest) -> bool:
        """Return whether the user may see and edit messages."""
        return self.may_see_messages(request) and self._has_right(request, "edit_message")

    def edit_url(self, request: HttpRequest, message: QueuedMessage) -> str:
        """Return the URL of the page, empty if the message does not wait or the user may not."""
        may = _waits(message) and self.may_edit(request)
        return self.url(QueuedMessage, "edit", message.pk) if may else ""

    @own_page(QueuedMessage, "edit", "edit/<int:id>/")
    @limited
    def edit_view(self, request: HttpRequest, id: int) -> HttpResponse:
        """Show the form, or make the change and log the user in one transaction."""
        if not self.may_edit(request):
            raise PermissionDenied
        row = self.get_queryset(request).filter(pk=id).first()
        if row is None or not _waits(row):
            text = f"Message {id} does not wait, so it cannot be edited."
            self.message_user(request, text, notices.WARNING)
            return HttpResponseRedirect(self.message_url(request, id))
        form, hint = self._form(request, row)
        if form.is_valid() and self._save(request, row, form):
            done = "has been changed" if form.changes() else "is unchanged"
            self.message_user(request, f"Message {id} {done}.", notices.SUCCESS)
            return HttpResponseRedirect(self.message_url(request, id))
        return self.show_page(
            request,
            "edit",
            f"Edit message {id}: {row.type}",
            form=form,
            hint=hint,
            back=self.message_url(request, id),
        )

    def _form(self, request: HttpRequest, row: QueuedMessage) -> tuple[EditForm, str]:
        """Return the form, and the reason if it has no payload."""
        text, digest, hint = "{}", "", ""
        if not self.may_see_payloads(request):
            hint = "The payload needs the permission “Can see payloads and error texts”."
        else:
            text = self.stored_json(row, "payload") or "null"
            digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
            text, hint = _editable(text)
        at: datetime = row.processable_after.replace(microsecond=0)
        initial = {"payload": text, "due": at, "priority": row.priority, "digest": digest}
        form = EditForm(request.POST if request.method == "POST" else None, initial=initial)
        if hint:
            del form.fields["payload"]
        return form, hint

    def _save(self, request: HttpRequest, row: QueuedMessage, form: EditForm) -> bool:
        changes = form.changes()
        if not changes:
            return True
        try:
            with writing(self.alias):
                queues.edit(row.pk, **changes, using=self.alias)
                names = ", ".join(name for name in changes if name != "digest")
                self.log(request, [row], CHANGE, f"Edited: {names}.")
        except MQError as error:
            form.refuse(error)
        except TookTooLong:
            form.add_error(None, "Another session has locked the message. Try again in a moment.")
        return form.is_valid()


def _waits(message: QueuedMessage) -> bool:
    """Return whether no worker has the message and it is not dead."""
    return message.leased_until is None and message.dead_at is None


def _editable(text: str) -> tuple[str, str]:
    """Return a stored payload as a form shows it, and a reason if it cannot be edited there."""
    if len(text) > MAX_TEXT:
        return "{}", "The payload is too large to be edited here."
    try:
        found = json.loads(text)
        if queues.redacted(found) != found:
            return "{}", "The payload has hidden values, so it cannot be edited here."
        return json.dumps(found, indent=2, ensure_ascii=False), ""
    except (ValueError, RecursionError):
        return "{}", "The payload cannot be decoded, so it cannot be edited here."
