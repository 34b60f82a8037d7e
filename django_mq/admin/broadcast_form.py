"""The form with which an operator broadcasts a message; each error is shown at its field."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from django_mq.admin.checked_forms import CheckedForm, JSONTextField, checked
from django_mq.conf import get_settings
from django_mq.exceptions import InvalidName, InvalidOption, InvalidPayload, RoutingError
from django_mq.handlers.periodic import check_metadata
from django_mq.messages.classes import class_of_type
from django_mq.outbox.build import HIGHEST, LOWEST
from django_mq.policy.column_bounds import MAX_NAME
from django_mq.policy.routing import check_key, check_name


def _suggesting(name: str) -> forms.TextInput:
    """Return a text box with the suggestions that the page lists under this name."""
    return forms.TextInput(
        {"class": "vTextField", "autocomplete": "off", "list": f"mq-suggest-{name}"}
    )


class BroadcastForm(CheckedForm):
    """The arguments of `broadcast()`."""

    error_fields = {
        RoutingError: "queue",
        InvalidName: "type",
        InvalidPayload: "payload",
        InvalidOption: "after",
    }
    type = forms.CharField(max_length=MAX_NAME, widget=_suggesting("type"))
    queue = forms.CharField(
        max_length=MAX_NAME,
        required=False,
        widget=_suggesting("queue"),
        help_text="Empty: the queues of the handlers.",
    )
    payload = JSONTextField(
        rows=10, help_text="JSON. If the type has a message class, its fields are checked."
    )
    metadata = JSONTextField(rows=3, help_text="A JSON object; handlers may select by it.")
    key = forms.CharField(label="Order key", max_length=MAX_NAME, required=False)
    unique_id = forms.CharField(
        max_length=MAX_NAME,
        required=False,
        help_text="While a message with this id waits or runs, no second one is stored.",
    )
    after = forms.DurationField(
        label="Delay", required=False, help_text="Seconds, or hours:minutes:seconds."
    )
    priority = forms.IntegerField(
        min_value=LOWEST, max_value=HIGHEST, initial=0, help_text="Higher first."
    )

    def clean_type(self) -> str:
        type: str = self.cleaned_data["type"]
        checked(lambda: check_name(type, "type"))
        return type

    def clean_queue(self) -> str | None:
        queue: str = self.cleaned_data["queue"]
        if queue:
            checked(lambda: check_name(queue, "queue"))
        return queue or None

    def clean_key(self) -> str | None:
        key: str = self.cleaned_data["key"]
        if key:
            checked(lambda: check_key(key, "order key"))
        return key or None

    def clean_unique_id(self) -> str | None:
        id: str = self.cleaned_data["unique_id"]
        if id:
            checked(lambda: check_key(id, "unique id"))
        return id or None

    def clean_after(self) -> timedelta | None:
        delay: timedelta | None = self.cleaned_data["after"]
        if delay is not None and delay < timedelta(0):
            raise ValidationError("A delay cannot be negative.")
        return delay

    def clean_metadata(self) -> Any:
        found = self.cleaned_data["metadata"]
        checked(lambda: get_settings().encode(check_metadata(found), "metadata"))
        return found

    def clean_payload(self) -> Any:
        found = self.cleaned_data["payload"]
        checked(lambda: get_settings().encode(found, "payload"))
        if known := class_of_type(self.cleaned_data.get("type", "")):
            checked(lambda: known.load(found, known.version))
        return found

    def options(self) -> dict[str, Any]:
        """Return the arguments of `broadcast()`."""
        known = class_of_type(self.cleaned_data["type"])
        return {**self.cleaned_data, "schema_version": known.version if known else 1}
