"""The form of a schedule created in the admin; it refuses schedules that could not be broadcast."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from django import forms
from django.core.exceptions import ValidationError

from django_mq.admin.checked_forms import JSONModelField, checked
from django_mq.conf import get_settings
from django_mq.exceptions import MQError
from django_mq.handlers.cron import UnknownZone, times_of
from django_mq.handlers.periodic import check_expires, check_type, disallowed
from django_mq.models import Schedule
from django_mq.policy.metadata import check_metadata
from django_mq.policy.names import check_name

if TYPE_CHECKING:
    StockForm = forms.ModelForm[Schedule]
else:
    StockForm = forms.ModelForm

CONTENT = ("payload", "metadata")
#: A change to one of these recomputes the next time.
TIMING = ("cron", "every", "tz", "enabled")
EDITABLE = (
    *("name", "type", *CONTENT, "queue", "cron", "every", "tz", "catch_up", "overlap"),
    *("expires", "enabled"),
)


class ScheduleForm(StockForm):
    """Checks values as `periodic()` does, and that the user may see the queue."""

    #: The queues that the user may choose; None: any queue, or no queue.
    allowed_queues: ClassVar[Collection[str] | None] = None

    class Meta:
        model = Schedule
        fields = EDITABLE
        field_classes = {"payload": JSONModelField, "metadata": JSONModelField}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Send the values of an edited schedule along with the form.

        Then a field that the user did not touch counts as unchanged, even if another user or a
        worker has changed it since.
        """
        super().__init__(*args, **kwargs)
        if not self.instance._state.adding:
            for name, field in self.fields.items():
                sent = self.add_prefix(f"initial-{name}") in self.data
                field.show_hidden_initial = sent or not self.is_bound

    def clean_name(self) -> Any:
        return checked(lambda: check_name(self.cleaned_data["name"], "name"))

    def clean_type(self) -> Any:
        return checked(lambda: check_type(self.cleaned_data["type"]))

    def clean_queue(self) -> str:
        queue: str = self.cleaned_data["queue"]
        if queue:
            checked(lambda: check_name(queue, "queue"))
        if self.allowed_queues is not None and queue not in self.allowed_queues:
            raise ValidationError("Choose a queue that you may see.")
        return queue

    def clean_payload(self) -> Any:
        found = self.cleaned_data["payload"]
        payload = {} if found is None else found
        checked(lambda: get_settings().encode_payload(payload))
        return payload

    def clean_metadata(self) -> Any:
        found = self.cleaned_data["metadata"]
        metadata = checked(lambda: check_metadata({} if found is None else found))
        checked(lambda: get_settings().encode_metadata(metadata))
        return metadata

    def clean_expires(self) -> timedelta | None:
        expires: timedelta | None = self.cleaned_data["expires"]
        checked(lambda: check_expires(expires, get_settings()))
        return expires

    def clean(self) -> dict[str, Any]:
        """Check the timing, and whether the message may go to the queue."""
        found = {**(super().clean() or {})}
        if {"cron", "every", "tz"} <= found.keys():
            cron, every = " ".join(found["cron"].split()), found["every"]
            found["cron"] = cron
            if bool(cron) == (every is not None):
                self.add_error("cron", "Give either a cron expression or an interval.")
            else:
                try:
                    times_of(cron, every, found["tz"], start=datetime(2000, 1, 1, tzinfo=UTC))
                except UnknownZone as error:
                    self.add_error("tz", str(error))
                except MQError as error:
                    self.add_error("cron" if cron else "every", str(error))
        if found.get("queue") and "type" in found:
            metadata = found.get("metadata", self.instance.metadata)
            if isinstance(metadata, dict) and (
                refused := disallowed(found["type"], metadata, found["queue"], get_settings())
            ):
                self.add_error("queue", refused)
        return found
