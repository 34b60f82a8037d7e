"""Checks of message classes, their upcasts, and the annotations of handlers."""

from __future__ import annotations

from django.core import checks

from django_mq.checks.registering import TAG, CheckMessages, check
from django_mq.conf import Settings
from django_mq.handlers import all_handlers
from django_mq.handlers.registry import is_subscribed
from django_mq.handlers.typed import annotation_errors, argument_misfit, refusal
from django_mq.messages.classes import message_classes, upcasts_without_class
from django_mq.messages.codecs import Unsupported


@check(TAG)
def check_message_classes(settings: Settings) -> CheckMessages:
    """E011: a gap in a chain of upcasts, or a stray one. E012: an annotation that cannot be met."""
    for type, version in upcasts_without_class():
        yield checks.Error(
            f"Version {version} of {type} has an upcast, but the type has no message class.",
            id="django_mq.E011",
        )
    for each in message_classes():
        gap = each.gap(each.oldest)
        if gap is not None:
            yield checks.Error(
                f"A message {each.type} of version {gap} cannot become version {each.version},"
                f" which {each.cls.__qualname__} has.",
                hint=f"Write the missing function: @upcast({each.type!r}, {gap}).",
                id="django_mq.E011",
            )
        try:
            each.codec  # noqa: B018  # is built now
        except Unsupported as error:
            yield checks.Error(
                f"The message class of {each.type} cannot be stored: {error}.", id="django_mq.E012"
            )
    for handler in all_handlers():
        for problem in annotation_errors(handler):
            yield checks.Error(f"{problem}.", id="django_mq.E012")


@check(TAG)
def check_arguments(settings: Settings) -> CheckMessages:
    """W012: a handler expects something else than it gets, such as the payload."""
    for handler in all_handlers():
        if handler.patterns and (found := argument_misfit(handler)):
            given = "a Delivery"
            hint = (
                "Read the payload from delivery.payload, or annotate the argument with a class that"
                " has @message(...). A list of deliveries needs batch=True."
            )
            if handler.batch:
                given = "a list of deliveries, because of batch=True"
                hint = (
                    "Annotate it with list[Delivery] or a list of a class that has @message(...)."
                )
            yield checks.Warning(
                f"The argument of the handler {handler.name} is annotated with {found}, but the"
                f" handler gets {given}.",
                hint=hint,
                id="django_mq.W012",
            )


@check(TAG)
def check_versions(settings: Settings) -> CheckMessages:
    """W010: a handler without the message class of a type holds its current version."""
    valid = [handler for handler in all_handlers() if not any(annotation_errors(handler))]
    for each in message_classes():
        name = each.cls.__qualname__
        for handler in valid:
            if is_subscribed(handler, each.type) and refusal(handler, each.type, each.version):
                # E012 refuses the annotation on a handler that also takes other types.
                is_alone = handler.patterns == (each.type,)
                advice = f", or annotate its argument with {name}" if is_alone else ""
                yield checks.Warning(
                    f"The handler {handler.name} holds new messages {each.type}: it understands"
                    f" version {handler.schema_version}, and their class {name} has version"
                    f" {each.version}.",
                    hint=f"Set schema_version={each.version} on the handler once it can read that"
                    f" version{advice}.",
                    id="django_mq.W010",
                )
