"""A patient worker that writes heartbeats often, and whose parts soon count as stalled."""

from django_mq.worker import lease_keeper, liveness
from tests.acceptance.app import patient  # noqa: F401

lease_keeper.HEARTBEAT_SECONDS = 1.0
liveness.MIN_STALL_SECONDS = 3.0
