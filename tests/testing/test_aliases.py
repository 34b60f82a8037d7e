"""Helpers with messages in two databases: `using=` names one of them."""

from __future__ import annotations

import pytest
from django.db import transaction
from django.test import TestCase

from django_mq import broadcast
from django_mq.testing import assert_broadcast, capture_broadcasts
from tests.other_alias import _other_alias  # noqa: F401  (fixture)


class TwoDatabasesTest(TestCase):
    databases = {"default", "other"}

    def test_assert_broadcast_counts_captures_of_the_alias(self) -> None:
        with capture_broadcasts() as captured:
            with transaction.atomic():
                broadcast("test.here")
            with transaction.atomic(using="other"):
                broadcast("test.there", using="other")
            assert_broadcast("test.here", times=1, using="default")
            assert_broadcast("test.here", times=0, using="other")
            assert_broadcast("test.there", times=1, using="other")
            with pytest.raises(AssertionError, match=r"there is: test\.here"):
                assert_broadcast("test.there", using="default")
            assert_broadcast("test.here", times=1)
            assert_broadcast("test.there", times=1)
        assert [each.type for each in captured] == ["test.here", "test.there"]
