"""A worker that does not soon release what waits behind long handlers: a busy test looks late."""

from django_mq.executor import local_queue

local_queue.STUCK_AFTER = 10.0
