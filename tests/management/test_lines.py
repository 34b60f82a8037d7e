"""Messages that block others: every command shows and releases them."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from django_mq.models import QueuedMessage
from tests.management.conftest import rows, run, run_json
from tests.rows import add

pytestmark = pytest.mark.django_db


class TestLines:
    """Messages that block others are shown and released."""

    def line(self, key="k", **columns):
        head = add(key=key, handler="h", **(columns or {"dead": -5, "attempts": 20}))
        return head, add(key=key, handler="h", blocked_by=head.pk)

    def test_status(self, settings):
        settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}}}
        head, _ = self.line("order/7")
        first = add("line", ordered=True, after=60)
        add("line", ordered=True)
        text = run("mq_status")
        assert "Others wait behind these" in text
        found = rows(text)
        assert found[str(head.pk)][:7] == [
            str(head.pk), "mail", "order/7", "h", "shop.orders.placed", "dead", "20/20",
        ]  # fmt: skip
        assert found[str(head.pk)][-1] == "1"
        assert found["line"][1:6] == ["waits", "for", "message", f"{first.pk},", "ordered"]
        answer = run_json("mq_status")
        assert [(each["id"], each["behind"]) for each in answer["heads"]] == [
            (head.pk, 1),
            (first.pk, 1),
        ]
        queues = {each["queue"]: each for each in answer["queues"]}
        assert (queues["mail"]["blocked_key"], queues["mail"]["head"]) == ("order/7", head.pk)
        assert (queues["line"]["ordered"], queues["line"]["head"]) == (True, first.pk)

    def test_status_shows_ten(self):
        heads = [self.line(f"k{n}")[0] for n in range(11)]
        text = run("mq_status")
        assert str(heads[9].pk) in rows(text)
        assert str(heads[10].pk) not in rows(text)
        assert "mq_peek --heads" in text
        assert len(run_json("mq_status")["heads"]) == 10

    def test_status_without_any(self):
        add(key="k")
        assert "Others wait" not in run("mq_status")
        assert run_json("mq_status")["heads"] == []

    def test_peek(self):
        head, follower = self.line()
        found = rows(run("mq_peek", "mail"))
        assert [words[4] for words in found.values()] == ["KEY", "k"]
        assert f"blocked, behind {head.pk}" in " ".join(found[str(follower.pk)])
        [row] = run_json("mq_peek", "mail")
        assert (row["key"], row["behind"]) == ("k", head.pk)

    def test_peek_at_heads(self):
        head, _ = self.line()
        self.line("other", after=60)
        add("other")
        assert rows(run("mq_peek", "mail", "--heads", "--limit", 1)).keys() == {
            "FIRST", str(head.pk),
        }  # fmt: skip
        assert [each["key"] for each in run_json("mq_peek", "--heads")] == ["k", "other"]
        assert (
            run("mq_peek", "other", "--heads")
            == "No messages wait behind a first message of their key or queue.\n"
        )
        for option in ("--dead", "--payload", "--skip-locked"):
            with pytest.raises(CommandError, match=f"cannot be combined with {option}"):
                run("mq_peek", "--heads", option)

    def test_why(self):
        head, follower = self.line()
        assert f"waits behind message {head.pk} of its key k" in run("mq_why", follower.pk)
        assert run_json("mq_why", follower.pk)["behind"] == head.pk

    def test_requeue_by_key(self):
        self.line("a"), self.line("b")
        assert run_json("mq_requeue", "--key", "a", "--dry-run")["ids"]
        assert "Requeued 1 message" in run("mq_requeue", "--key", "a", "--handler", "h", "--yes")
        assert QueuedMessage.objects.dead().get().key == "b"
        assert "Nothing" in run("mq_requeue", "--key", "b", "--handler", "x", "--yes")

    def test_purge_by_key_or_id_frees_the_followers(self):
        (_, one), (head, two) = self.line("a"), self.line("b", after=60)
        assert "Removed 1 message" in run("mq_purge", "--key", "a", "--yes")
        assert "Nothing was removed" in run("mq_purge", "--id", head.pk, "--yes")
        assert QueuedMessage.objects.filter(pk=head.pk).exists()
        assert "Removed 1 message" in run("mq_purge", "--id", head.pk, "--waiting", "--yes")
        states = dict(QueuedMessage.objects.with_state().values_list("pk", "state"))
        assert states == {one.pk: "processable", two.pk: "processable"}

    def test_an_id_goes_with_no_other_choice(self):
        for options in (["--key", "k"], ["--limit", "1"], ["--older-than", "1d"]):
            with pytest.raises(CommandError, match="not both"):
                run("mq_purge", "--id", "1", *options, "--yes")
