"""Forms whose values the package itself checks, and a field for a JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from django import forms
from django.core.exceptions import ValidationError
from django.forms.fields import InvalidJSONInput

from django_mq.exceptions import MQError
from django_mq.policy.column_bounds import MAX_NAME
from django_mq.policy.encoding import MAX_DIGITS

T = TypeVar("T")


def checked(check: Callable[[], T]) -> T:
    """Return the result of `check()`; an error of the package becomes an error of the field."""
    try:
        return check()
    except MQError as error:
        raise ValidationError(str(error)) from error


def _decoded(decode: Callable[[], T]) -> T:
    """Return the document that `decode()` reads; any failure becomes an error of the field."""
    try:
        return decode()
    except json.JSONDecodeError as error:
        raise ValidationError(f"This is not JSON: {error}.") from error
    except ValueError as error:  # Python's own text advises a change of the interpreter's limit
        text = f"This JSON has an integer of more than {MAX_DIGITS:,} digits."
        raise ValidationError(text) from error
    except RecursionError as error:
        raise ValidationError("This JSON is nested too deeply.") from error


class CheckedForm(forms.Form):
    """A form for one call of the package, whose error is shown at its field."""

    #: The class of labels that the stock admin marks so.
    required_css_class = "required"

    #: The field for each class of error; the first class that fits counts.
    error_fields: ClassVar[dict[type[MQError], str]] = {}

    def refuse(self, error: MQError) -> None:
        """Show an error of the call at its field."""
        fields = (name for kind, name in self.error_fields.items() if isinstance(error, kind))
        self.add_error(next(fields, None), str(error))


class CheckedTextField(forms.CharField):
    """A text that the package's `check` accepts as `what`; empty text is None."""

    def __init__(self, check: Callable[[str, str], str], what: str, **options: Any) -> None:
        super().__init__(max_length=MAX_NAME, empty_value=None, **options)
        self.check, self.what = check, what

    def clean(self, value: Any) -> Any:
        text = super().clean(value)
        return text and checked(lambda: self.check(text, self.what))


class JSONModelField(forms.JSONField):
    """The stock field of a JSON column, for which any bad text is an error of the field.

    The stock field raises for long integers and deep documents, and cannot show lone surrogates
    again: this field shows the text as it was typed.
    """

    def to_python(self, value: Any) -> Any:
        return _decoded(lambda: super(JSONModelField, self).to_python(value))

    def bound_data(self, data: Any, initial: Any) -> Any:
        if self.disabled:
            return initial
        return None if data is None else InvalidJSONInput(data)


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
        return _decoded(lambda: json.loads(text)) if text else {}

    def has_changed(self, initial: Any, data: Any) -> bool:
        """Return whether the documents differ, regardless of formatting."""
        try:
            texts = (
                json.dumps(json.loads(each or "{}"), sort_keys=True) for each in (initial, data)
            )
            return next(texts) != next(texts)
        except (ValueError, RecursionError):
            return True
