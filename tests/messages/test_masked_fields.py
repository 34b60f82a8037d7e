"""pydantic writes secrets as asterisks: a message class with such a field loses them in silence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Optional

import msgspec
import pydantic
import pytest
from django.core.checks import run_checks
from pydantic import Secret, SecretBytes, SecretStr

from django_mq import InvalidPayload, Message, message
from django_mq.messages.classes import isolated, message_class


@pytest.fixture(autouse=True)
def _own_classes() -> Iterator[None]:
    with isolated():
        yield


class Inner(pydantic.BaseModel):
    token: SecretStr


@dataclass
class Pair:
    name: str
    token: SecretStr


class Recursive(pydantic.BaseModel):
    token: SecretStr
    inner: Optional[Recursive] = None  # noqa: UP045


def problems() -> list[str]:
    return [each.msg for each in run_checks(tags=["django_mq"]) if each.id == "django_mq.E012"]


@pytest.mark.parametrize(
    ("annotation", "field"),
    [
        (SecretStr, "Built.field"),
        (SecretBytes, "Built.field"),
        (Secret[str], "Built.field"),
        (SecretStr | None, "Built.field"),
        (list[dict[str, SecretStr]], "Built.field"),
        (Annotated[SecretStr, pydantic.Field(min_length=3)], "Built.field"),
        (Inner, "Inner.token"),
        (list[Pair], "Pair.token"),
        (Recursive, "Recursive.token"),
        (list[Recursive] | None, "Recursive.token"),
    ],
    ids=str,
)
def test_a_field_that_is_written_as_asterisks_is_refused(annotation: Any, field: str) -> None:
    """Where the class is declared, by the system check, and in the producer before any SQL."""
    built = pydantic.create_model("Built", field=annotation)
    message("a.b")(built)
    why = f"{field}: pydantic writes a secret as asterisks: send a reference"
    with pytest.raises(InvalidPayload, match=f"^{re.escape(why)}"):
        Message(built.model_construct(field="x"))
    [problem] = problems()
    assert why in problem


def test_a_class_that_is_completed_later_is_looked_at_then() -> None:
    class Outer(pydantic.BaseModel):
        inner: "Later"  # noqa: UP037

    message("a.b")(Outer)

    class Later(pydantic.BaseModel):
        token: SecretStr

    Outer.model_rebuild()
    [problem] = problems()
    assert "Later.token" in problem


def revealed(secret: SecretStr) -> str:
    return secret.get_secret_value()


class Own(pydantic.BaseModel):
    token: SecretStr

    @pydantic.field_serializer("token")
    def write(self, token: SecretStr) -> str:
        return revealed(token)


class OwnWhole(pydantic.BaseModel):
    token: SecretStr

    @pydantic.model_serializer
    def write(self) -> dict[str, str]:
        return {"token": revealed(self.token)}


class OwnType(pydantic.BaseModel):
    token: Annotated[SecretStr, pydantic.PlainSerializer(revealed)]
    unstored: SecretStr = pydantic.Field(SecretStr(""), exclude=True)


@pytest.mark.parametrize("cls", [Own, OwnWhole, OwnType])
def test_a_field_with_a_serializer_of_its_own_is_stored(cls: Any) -> None:
    message("a.b")(cls)
    assert problems() == []
    assert Message(cls(token="x")).payload == {"token": "x"}
    found = message_class(cls)
    assert found is not None
    assert revealed(found.load({"token": "x"}, 1).token) == "x"


class Struct(msgspec.Struct):
    token: SecretStr


@pytest.mark.parametrize("cls", [Pair, Struct])
def test_other_kinds_of_classes_have_no_secrets(cls: Any) -> None:
    message("a.b")(cls)
    [problem] = problems()
    assert "SecretStr" in problem
