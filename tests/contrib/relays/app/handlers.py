"""A relay of all messages of the shop."""

from django_mq.contrib.relays import relay

relay("shop.#", to="events")
