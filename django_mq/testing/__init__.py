"""Helpers for your own tests: run due messages, inspect broadcasts, move time, in a plain TestCase.

For example::

    class CheckoutTest(TestCase):
        def test_confirmation(self):
            with capture_broadcasts() as broadcasts:
                self.client.post("/orders/", {...})
            self.assertEqual([each.type for each in broadcasts], ["shop.orders.placed"])
            drain()
            self.assertEqual(len(mail.outbox), 1)
"""

from django_mq.testing.call import deliver
from django_mq.testing.capture import Broadcast, assert_broadcast, capture_broadcasts
from django_mq.testing.run import HandlerErrors, answering, drain, due

__all__ = [
    "Broadcast",
    "HandlerErrors",
    "answering",
    "assert_broadcast",
    "capture_broadcasts",
    "deliver",
    "drain",
    "due",
]
