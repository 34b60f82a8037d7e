"""A form field for a JSON document, which may be malformed in any way."""

from __future__ import annotations

import json
from typing import Any

from django import forms
from django.core.exceptions import ValidationError


class JSONTextField(forms.CharField):
    """A JSON document; empty text is an empty object. Any bad text is an error of the field.

    The stock field raises RecursionError for a document that is nested too deeply.
    """

    def __init__(self, *, rows: int, **options: Any) -> None:
        attributes = {"rows": rows, "spellcheck": "false", "class": "vLargeTextField mq-json"}
        super().__init__(
            required=False, strip=True, widget=forms.Textarea(attributes), initial="{}", **options
        )

    def clean(self, value: Any) -> Any:
        """Return the decoded document."""
        text = super().clean(value)
        try:
            return json.loads(text) if text else {}
        except ValueError as error:
            raise ValidationError(f"This is not JSON: {error}.") from error
        except RecursionError as error:
            raise ValidationError("This JSON is nested too deeply.") from error

    def has_changed(self, initial: Any, data: Any) -> bool:
        """Return whether the documents differ, regardless of formatting."""
        try:
            texts = (
                json.dumps(json.loads(each or "{}"), sort_keys=True) for each in (initial, data)
            )
            return next(texts) != next(texts)
        except (ValueError, RecursionError):
            return True
