"""Sent messages, their effects and their removals: written by senders, handlers and a trigger.

A message is known by the `name` in its payload, which outlives its row. `promise` is one of:

- `once`: one effect, which appears with the removal of the message;
- `repeat`: at least one effect, since each run commits by itself;
- `run`: it has no effect, and at least one run of its handler returned.

Messages with the same `line` must be handled one after another, in the order of `id`.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from django.conf import settings
from django.db import connections

Promise = Literal["once", "repeat", "run"]

ALIAS: str = getattr(settings, "DJANGO_MQ", {}).get("DATABASE") or "default"

# No unique constraint on effects: a repeated one must show, and not be refused.
CREATE = """
create table faults_sent (
    id bigint generated always as identity primary key,
    name text not null unique,
    promise text not null,
    line text,
    fails int not null,
    waits bool not null,
    request bigint
);
create table faults_effect (
    id bigint generated always as identity primary key,
    name text not null,
    attempt int not null,
    pid int not null
);
create table faults_removed (
    name text not null,
    attempt int not null
);
create table faults_trace (
    id bigint primary key,
    event text not null,
    name text not null,
    attempt int not null,
    pid int not null
);
create function faults_note_removal() returns trigger language plpgsql as $$
begin
    insert into faults_removed (name, attempt) values (old.payload ->> 'name', old.attempts);
    return null;
end $$;
create trigger faults_removal after delete on django_mq_queuedmessage
    for each row when (starts_with(old.type, 'faults.'))
    execute function faults_note_removal();
"""
TABLES = ("faults_sent", "faults_effect", "faults_removed", "faults_trace")
DROP = "; ".join(
    ["drop function if exists faults_note_removal cascade"]
    + [f"drop table if exists {table}" for table in TABLES]
)

SEND = """
insert into faults_sent (name, promise, line, fails, waits, request)
values (%s, %s, %s, %s, %s, %s)
"""
EFFECT = "insert into faults_effect (name, attempt, pid) values (%s, %s, %s)"


def sent(
    name: str,
    promise: Promise,
    *,
    line: str | None = None,
    fails: int = 0,
    waits: bool = False,
    request: int | None = None,
) -> None:
    """Record, in the transaction that broadcasts it, that a message is sent.

    Its first `fails` attempts raise. One that `waits` is not due while the point runs; `request` is
    the id under which a reply is awaited.
    """
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(SEND, (name, promise, line, fails, waits, request))


def effect(delivery: Any) -> None:
    """Write the effect of a message, in the current transaction."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(EFFECT, (delivery.payload["name"], delivery.attempt, os.getpid()))
