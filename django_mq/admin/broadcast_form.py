"""The form with which an operator broadcasts a message; each error is shown at its field."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.core.validators import MinValueValidator

from django_mq.admin.checked_forms import CheckedForm, CheckedTextField, JSONTextField, checked
from django_mq.conf import get_settings
from django_mq.exceptions import InvalidName, InvalidOption, InvalidPayload, RoutingError
from django_mq.messages.classes import class_of_type
from django_mq.policy.column_bounds import MAX_PRIORITY, MIN_PRIORITY
from django_mq.policy.metadata import check_metadata
from django_mq.policy.names import check_key, check_name


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
