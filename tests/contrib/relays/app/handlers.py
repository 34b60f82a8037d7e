"""A relay of what the shop says."""

from django_mq.contrib.relays import relay

relay("shop.#", to="events")
