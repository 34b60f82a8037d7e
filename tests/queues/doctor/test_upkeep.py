"""Findings about vacuum: D005 to D009."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
from django.db import connection

from django_mq.queues.doctor import upkeep
from django_mq.store.oldest_snapshot import HorizonHolder
from django_mq.store.vacuum import Versions
from tests.database import second_connection
from tests.queues.doctor.examined import found, run
from tests.rows import add
from tests.waiting import until

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


class TestOldSnapshots:
    def test_d005_a_session(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with second_connection() as other:
            other.execute("begin isolation level repeatable read; select 1")
            pid = other.info.backend_pid
            assert not any(f"session {pid} " in text for text in found("D005"))
            monkeypatch.setattr(upkeep, "OLD_SNAPSHOT_SECONDS", 0.0)
            assert any(f"pg_terminate_backend({pid})" in text for text in found("D005"))
            (text,) = [text for text in found("D005") if f"session {pid} " in text]
            assert re.search(r"keeps vacuum from removing rows that died after \d{4}-", text)

    def test_d006_a_prepared_transaction(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upkeep, "OLD_SNAPSHOT_SECONDS", 0.0)
        with second_connection() as other:
            if other.execute("show max_prepared_transactions").fetchone() == ("0",):
                pytest.skip("the server prepares no transactions")
            other.execute("begin; select txid_current(); prepare transaction 'mq''doctor'")
            try:
                assert any("ROLLBACK PREPARED 'mq''doctor'" in text for text in found("D006"))
            finally:
                other.execute("rollback prepared 'mq''doctor'")

    def test_d006_quotes_the_name_of_the_transaction(self) -> None:
        """The client that prepares it chooses any text; operators copy the command."""
        since = datetime(2026, 1, 1, tzinfo=UTC)
        holder = HorizonHolder("prepared transaction", "it's {0}", "ada", "", "", since)
        assert upkeep.hint_for(holder).endswith("ROLLBACK PREPARED 'it''s {0}'.")

    def test_d007_a_slot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upkeep, "RETAINED_WAL_BYTES", 0)
        name = f"mq_doctor_{connection.settings_dict['NAME'].removeprefix('test_')}"[:63]
        with second_connection() as other:
            other.execute("select pg_create_physical_replication_slot(%s, true)", [name])
            try:
                assert any(f"drop_replication_slot('{name}')" in text for text in found("D007"))
            finally:
                other.execute("select pg_drop_replication_slot(%s)", [name])
        assert found("D007") == []


class TestVacuum:
    def test_d008_autovacuum_is_off_for_a_table(self) -> None:
        assert found("D008") == []
        run("alter table django_mq_uniquekey set (autovacuum_enabled = off)")
        (text,) = found("D008")
        assert "off for django_mq_uniquekey" in text

    @pytest.mark.django_db(transaction=True)
    def test_d009_dead_rows_that_stay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upkeep, "DEAD", 50)
        monkeypatch.setattr(upkeep, "UNVACUUMED", 0.0)
        run(
            "alter table django_mq_queuedmessage set (autovacuum_enabled = off)"
        )  # it may be quicker

        def leaves_dead_rows() -> bool:
            # A vacuum that began before earlier tests deleted their rows counts them as live.
            run("vacuum (analyze) django_mq_queuedmessage")
            for _ in range(100):
                add()
            run("delete from django_mq_queuedmessage")
            run("select pg_stat_force_next_flush()")
            return any("django_mq_queuedmessage has " in text for text in found("D009"))

        try:  # an earlier vacuum may only now report that no row is dead
            until(leaves_dead_rows, "the dead rows are found")
        finally:
            run("alter table django_mq_queuedmessage reset (autovacuum_enabled)")
        run("vacuum django_mq_queuedmessage")
        run("select pg_stat_force_next_flush()")
        # Other tables have leftovers of earlier tests.
        assert not any("django_mq_queuedmessage has " in text for text in found("D009"))

    @pytest.mark.parametrize(
        ("dead", "live", "since", "is_found"),
        [
            (300_000, 250_000, 700.0, True),
            (300_000, 350_000, 700.0, False),
            (150_000, 100_000, 700.0, False),
            (300_000, 250_000, 500.0, False),
            (300_000, 250_000, None, True),
        ],
    )
    def test_d009_dead_rows_that_are_many_beside_the_live_ones_for_ten_minutes(
        self,
        dead: int,
        live: int,
        since: float | None,
        is_found: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        found_now = {"django_mq_queuedmessage": Versions(dead, live, since)}
        monkeypatch.setattr(upkeep, "versions", lambda cursor: found_now)
        assert bool(found("D009")) == is_found
