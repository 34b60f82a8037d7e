"""Requests: messages whose handler's return value comes back to the caller."""

from __future__ import annotations

from django_mq.requests.asking import aask, agather, arequest, ask, gather, request
from django_mq.requests.pending import PendingReply

__all__ = ["PendingReply", "aask", "agather", "arequest", "ask", "gather", "request"]
