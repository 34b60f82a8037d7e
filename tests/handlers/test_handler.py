"""@handler and its registry."""

import asyncio
import dataclasses
import functools
import json
import types
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

import pytest
from django.apps import apps

from django_mq import Delivery, InvalidHandler, RetryPolicy, fixed, handler, handlers
from django_mq.conf import get_settings


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with handlers.isolated():
        yield


def plain(delivery: Delivery) -> None: ...


def another(delivery: Delivery) -> None: ...


def optional(delivery: Delivery, also: int = 0, *, flag: bool = False) -> None: ...


async def waiting(delivery: Delivery) -> None: ...


def no_argument() -> None: ...


def two_arguments(one: Delivery, two: Delivery) -> None: ...


def keyword_only(*, delivery: Delivery) -> None: ...


def required_keyword(delivery: Delivery, *, flag: bool) -> None: ...


def generator(delivery: Delivery) -> Iterator[None]:
    yield


class Service:
    def __init__(self, delivery: Delivery) -> None: ...

    def method(self, delivery: Delivery) -> None: ...


class Callee:
    def __call__(self, delivery: Delivery) -> None: ...


class AsyncCallee:
    async def __call__(self, delivery: Delivery) -> None: ...


class Tier(StrEnum):
    GOLD = "gold"


# Like the tasks of django.tasks, which may not be installed.
Task = type("Task", (), {"__module__": "django_tasks.base", "func": plain})


def test_decorated_function_is_unchanged_and_found_by_name() -> None:
    """RMQ-4: handlers come from a registry."""
    assert handler("shop.orders.placed")(plain) is plain
    found = handlers.get(f"{__name__}.plain")
    assert found is not None
    assert found.function is plain
    assert handlers.all_handlers() == (found,)
    assert handlers.get("os.system") is None


def test_defaults() -> None:
    """KAF-19: only the pattern is required."""
    handler("a.b")(plain)
    (found,) = handlers.all_handlers()
    assert {
        each.name: getattr(found, each.name)
        for each in dataclasses.fields(found)
        if each.name not in ("function", "call", "name")
    } == {
        "patterns": ("a.b",),
        "queue": None,
        "queues": (),
        "where": None,
        "match": "all",
        "aliases": (),
        "schema_version": 1,
        "retry": None,
        "atomic": True,
        "batch": False,
        "timeout": None,
        "is_async": False,
        "max_batch": None,
        "linger": 0.0,
        "history": None,
        "history_payload": None,
        "any_queue": False,
        "of_row": None,
    }
    settings = get_settings()
    assert handlers.queue_of(found, settings) == "default"
    assert handlers.timeout_of(found, settings) == 300.0
    assert handlers.retry_of(found, "default", settings) == RetryPolicy()


def test_options_are_kept() -> None:
    policy = RetryPolicy(max_attempts=3, backoff=lambda attempt: attempt)
    handler(
        "a.*", "#", "a.*", queue="mail", queues=["slow", "mail"], where={"tier": "gold"},
        match="any", name="send", aliases=("old.send", "send"), schema_version=2, retry=policy,
        atomic=False, timeout=timedelta(minutes=2),
    )(plain)  # fmt: skip
    (found,) = handlers.all_handlers()
    assert found.patterns == ("a.*", "#")
    assert found.where == {"tier": "gold"}
    assert found.aliases == ("old.send",)
    assert (found.atomic, found.schema_version, found.timeout) == (False, 2, 120.0)
    assert handlers.get("old.send") is handlers.get("send") is found
    assert handlers.allowed_queues(found, get_settings()) == ("mail", "slow")
    assert handlers.retry_of(found, "mail", get_settings()) is policy


def test_the_queues_policy_stands_between_the_handlers_and_the_default(settings: Any) -> None:
    of_queue = RetryPolicy(max_attempts=4)
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"retry": of_queue}}, "RETRY": RetryPolicy.never()}
    handler("a", name="a", queue="mail")(plain)
    handler("a", name="b", retry=RetryPolicy(backoff=fixed(1)))(another)
    without, with_policy = handlers.all_handlers()
    now = get_settings()
    assert handlers.retry_of(without, "mail", now) == of_queue
    assert handlers.retry_of(without, "other", now) == RetryPolicy.never()
    assert handlers.retry_of(None, "mail", now) == of_queue
    assert handlers.retry_of(with_policy, "mail", now) == RetryPolicy(backoff=fixed(1))


def test_async_handlers_are_never_atomic() -> None:
    handler("a", name="function")(waiting)
    handler("a", name="partial")(functools.partial(waiting))
    handler("a", name="instance")(AsyncCallee())
    handler("a", name="method")(AsyncCallee().__call__)
    assert [(each.is_async, each.atomic) for each in handlers.all_handlers()] == [(True, False)] * 4


def test_a_plain_wrapper_around_an_async_function_is_plain() -> None:
    @handler("a")
    @functools.wraps(waiting)
    def run(delivery: Delivery) -> None:
        asyncio.run(waiting(delivery))

    assert [(each.is_async, each.atomic) for each in handlers.all_handlers()] == [(False, True)]


@pytest.mark.parametrize("accepted", [optional, Service(None).method, lambda delivery: None])  # type: ignore[arg-type]
def test_callable_with_one_argument_is_accepted(accepted: Callable[..., Any]) -> None:
    """NSQ-22: a function, a method, or any other callable with one argument."""
    handler("a", name="it")(accepted)
    assert handlers.get("it") is not None


def test_a_name_leaves_out_locals() -> None:
    def local(delivery: Delivery) -> None: ...

    handler("a")(local)
    assert [each.name for each in handlers.all_handlers()] == [
        f"{__name__}.test_a_name_leaves_out_locals.local"
    ]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        pytest.param(Service, "Service is a class: put @handler on a function", id="class"),
        pytest.param(Task(), "is a Django task: put @handler on a plain function", id="task"),
        pytest.param("plain", "put @handler on a function, not on a str", id="text"),
        pytest.param(no_argument, "no_argument must take one positional", id="no-argument"),
        pytest.param(two_arguments, "must take one positional", id="two-arguments"),
        pytest.param(Service.method, "method is a method of a class", id="unbound-method"),
        pytest.param(keyword_only, "must take one positional", id="keyword-only"),
        pytest.param(required_keyword, "must take one positional", id="required-keyword"),
        pytest.param(generator, "generator is a generator", id="generator"),
        pytest.param(functools.partial(generator), "is a generator", id="partial-of-generator"),
        pytest.param(functools.partial(plain), "a partial has no name of its own", id="partial"),
        pytest.param(Callee(), "a Callee has no name of its own", id="instance"),
        pytest.param(lambda delivery: None, r"give @handler\(..., name=...\)", id="lambda"),
    ],
)
def test_invalid_handler_is_refused(function: Any, said: str) -> None:
    with pytest.raises(InvalidHandler, match=said):
        handler("a.b")(function)
    assert handlers.all_handlers() == ()


def test_a_task_of_django_itself_is_refused() -> None:
    tasks = pytest.importorskip("django.tasks")
    with pytest.raises(InvalidHandler, match="Django task"):
        handler("a.b")(tasks.task(no_argument))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"queue": "no spaces"}, "queue 'no spaces' is not a name", id="queue"),
        pytest.param({"queue": ""}, "queue '' is not a name", id="empty-queue"),
        pytest.param({"queues": "mail"}, r'queues=\("mail",\)', id="queues-text"),
        pytest.param({"queues": ("a b",)}, "is not a name", id="queues-name"),
        pytest.param({"aliases": "old"}, "aliases= must be a tuple", id="aliases-text"),
        pytest.param({"name": "é"}, "is not a name", id="name"),
        pytest.param({"name": "x" * 129}, "is not a name", id="long-name"),
        pytest.param({"where": ["tier"]}, "where= must be a dict", id="where"),
        pytest.param({"where": {1: "gold"}}, "where= must be a dict", id="where-key"),
        pytest.param({"match": "some"}, 'match= must be "all" or "any"', id="match"),
        pytest.param({"schema_version": 0}, "a whole number from 1", id="version-0"),
        pytest.param({"schema_version": -(10**5000)}, "a value of type int", id="version-huge"),
        pytest.param({"schema_version": True}, "a whole number from 1", id="version-bool"),
        pytest.param({"retry": 3}, "retry= must be a RetryPolicy", id="retry"),
        pytest.param({"timeout": 0}, "timeout= must be seconds above zero", id="timeout-0"),
        pytest.param({"timeout": "5"}, "timeout= must be seconds above zero", id="timeout-text"),
        pytest.param({"timeout": float("inf")}, "timeout= must be seconds", id="timeout-infinite"),
        pytest.param({"batch": 50}, "max_batch=", id="batch-number"),
        pytest.param({"max_batch": 5}, "add batch=True", id="max-batch-alone"),
        pytest.param({"batch": True, "max_batch": 0}, "whole number from 1", id="max-batch-0"),
        pytest.param({"batch": True, "max_batch": 10_001}, "from 1 to 10,000", id="max-batch-high"),
        pytest.param({"batch": True, "max_batch": 10**5000}, "10,000", id="max-batch-digits"),
        pytest.param({"schema_version": 2**31}, "from 1 to 2,147,483,647", id="version-high"),
        pytest.param({"schema_version": 10**5000}, "2,147,483,647", id="version-digits"),
        pytest.param({"batch": True, "max_batch": True}, "whole number", id="max-batch-bool"),
        pytest.param({"timeout": 10**5000}, "timeout= must be seconds", id="timeout-digits"),
        pytest.param({"retry": 10**5000}, "retry= must be a RetryPolicy", id="retry-digits"),
        pytest.param({"history": 10**5000}, "history= must be seconds", id="history-digits"),
        pytest.param({"batch": 10**5000}, "batch= must be True or False", id="batch-digits"),
        pytest.param({"atomic": 10**5000}, "atomic= must be True", id="atomic-digits"),
        pytest.param({"match": 10**5000}, "match= must be", id="match-digits"),
        pytest.param({"where": {"x": 10**5000}}, "which never equals", id="where-digits"),
        pytest.param({"every": 10**5000}, "every must be seconds", id="every-digits"),
        pytest.param({"cron": 10**5000}, "cron must be an expression", id="cron-digits"),
        pytest.param({"linger": 1, "atomic": False}, "add batch=True", id="linger-alone"),
        pytest.param({"batch": True, "linger": 1}, "atomic=False", id="linger-atomic"),
        pytest.param({"batch": True, "linger": -1}, "linger= must be seconds", id="linger-below-0"),
        pytest.param({"atomic": "no"}, "atomic= must be True or False, not 'no'", id="atomic-text"),
        pytest.param({"tz": "Europe/Berlin"}, "tz= .* add cron= or every=", id="tz-alone"),
        pytest.param(
            {"cron": "* * * * *", "every": 60},
            r"^\S+plain: a schedule takes cron= or every=, not both$",
            id="cron-and-every",
        ),
        pytest.param({"match": "any"}, "needs where=", id="match-of-nothing"),
        pytest.param({"match": "any", "where": {}}, "needs where=", id="match-of-empty"),
        pytest.param({"where": {"tier": ("a", "b")}}, r"\('a', 'b'\).*never", id="where-tuple"),
        pytest.param({"where": {"tier": {"a"}}}, "never", id="where-set"),
        pytest.param({"where": {"on": date(2030, 1, 1)}}, "never", id="where-date"),
        pytest.param({"where": {"id": UUID(int=1)}}, "never", id="where-uuid"),
        pytest.param({"where": {"map": {1: "a"}}}, "never", id="where-key-inside"),
        pytest.param({"where": {"x": float("nan")}}, "never", id="where-nan"),
        pytest.param({"where": {"x": len}}, "never", id="where-function"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidHandler, match=said):
        handler("a.b", **options)(plain)
    assert handlers.all_handlers() == ()


@pytest.mark.parametrize(
    "where", [{"a": [1, {"b": None}]}, {"a": Tier.GOLD}, {"a": 1.5, "b": True}, {}], ids=repr
)
def test_a_where_that_metadata_can_meet_is_accepted(where: dict[str, Any]) -> None:
    handler("a", where=where)(plain)
    metadata = json.loads(json.dumps(where))
    assert len(handlers.table().match("a", metadata)) == 1


@pytest.mark.parametrize(
    "function",
    [waiting, AsyncCallee(), functools.partial(waiting)],
    ids=["function", "instance", "partial"],
)
def test_an_async_handler_cannot_be_atomic(function: Any) -> None:
    """The handler had accepted it, and its writes were committed one by one."""
    with pytest.raises(InvalidHandler, match=r"no async transactions.*plain def"):
        handler("a.b", name="it", atomic=True)(function)
    assert handlers.all_handlers() == ()
    handler("a.b", name="it", atomic=False)(function)
    assert [each.atomic for each in handlers.all_handlers()] == [False]


@pytest.mark.parametrize(("function", "atomic"), [(plain, False), (waiting, None)])
def test_a_batch_handler_outside_transactions(function: Any, atomic: bool | None) -> None:
    handler("a.b", batch=True, atomic=atomic, max_batch=5, linger=timedelta(minutes=1))(function)
    [found] = handlers.all_handlers()
    assert (found.atomic, found.max_batch, found.linger) == (False, 5, 60.0)


@pytest.mark.parametrize("patterns", [(), ("",), ("a b",), ("a.**",), (5,), ("ok", "ä")], ids=repr)
def test_no_pattern_or_a_bad_one_is_refused(patterns: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidHandler):
        handler(*patterns)(plain)


def test_the_brackets_must_not_be_forgotten() -> None:
    with pytest.raises(InvalidHandler, match="say what plain subscribes to"):
        handler(plain)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"name": "first"}, {"name": "old"}, {"name": "x", "aliases": ("first",)}], ids=repr
)
def test_a_name_belongs_to_one_handler(options: dict[str, Any]) -> None:
    handler("a", name="first", aliases=("old",))(plain)
    with pytest.raises(InvalidHandler, match=r"already belongs to the handler plain:.*aliases="):
        handler("b", **options)(another)
    assert [each.function for each in handlers.all_handlers()] == [plain]


def test_one_function_may_be_two_handlers_of_different_names() -> None:
    @handler("a", name="one", queue="mail")
    @handler("b", "a", name="two", timeout=5)
    def stacked(delivery: Delivery) -> None: ...

    one, two = handlers.get("one"), handlers.get("two")
    assert one is not None
    assert two is not None
    assert one.function is two.function is stacked
    assert (one.queue, one.timeout, two.queue, two.timeout) == ("mail", None, None, 5.0)
    assert [each.name for each in handlers.table().match("a", {})] == ["two", "one"]


def test_a_reloaded_module_replaces_both_handlers_of_a_function() -> None:
    source = """
from django_mq import handler

@handler("PATTERN.a", name="one")
@handler("PATTERN.b", name="two")
def stacked(delivery): ...
"""
    for pattern in ("old", "new"):
        run_module(source.replace("PATTERN", pattern), "handlers.py")
    assert [each.patterns for each in handlers.all_handlers()] == [("new.b",), ("new.a",)]


@pytest.mark.parametrize("options", [{}, {"name": "it"}], ids=repr)
def test_two_decorators_of_one_name_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidHandler, match=r"give all its patterns to one @handler"):

        @handler("a", **options)
        @handler("b", **options)
        def stacked(delivery: Delivery) -> None: ...

    assert [each.patterns for each in handlers.all_handlers()] == [("b",)]


def test_two_decorators_are_found_out_through_another_between_them() -> None:
    def wrapping(function: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        return functools.wraps(function)(lambda delivery: function(delivery))

    with pytest.raises(InvalidHandler, match=r"give all its patterns to one @handler"):

        @handler("a")
        @wrapping
        @handler("b")
        def stacked(delivery: Delivery) -> None: ...


SOURCE = """
from django_mq import handler

@handler("PATTERN", aliases=("ALIAS",))
def reloaded(delivery): ...
"""


def run_module(source: str, file: str) -> None:
    module = types.ModuleType("shop.handlers")
    exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102


def test_a_reloaded_module_replaces_its_handler() -> None:
    handler("first", name="first")(plain)
    run_module(SOURCE.replace("PATTERN", "old").replace("ALIAS", "before"), "handlers.py")
    assert [each.name for each in handlers.table().match("old", {})] == ["shop.handlers.reloaded"]
    handler("last", name="last")(another)
    run_module(SOURCE.replace("PATTERN", "new").replace("ALIAS", "after"), "handlers.py")
    assert [each.patterns for each in handlers.all_handlers()] == [("first",), ("new",), ("last",)]
    assert handlers.table().match("old", {}) == ()
    assert handlers.get("before") is None
    assert handlers.get("after") is handlers.get("shop.handlers.reloaded")


@pytest.mark.parametrize(
    "options",
    [
        [{"patterns": ("shop.eu.placed",)}, {"patterns": ("shop.us.placed",)}],
        [{"queue": "eu"}, {"queue": "us"}],
        [{"where": {"region": "eu"}}, {"where": {"region": "us"}}],
    ],
    ids=repr,
)
def test_the_functions_of_a_loop_need_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch, options: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(apps, "ready", False)

    def subscribe(patterns: tuple[str, ...] = ("shop.placed",), **rest: Any) -> None:
        @handler(*patterns, **rest)
        def on_order(delivery: Delivery) -> None: ...

    subscribe(**options[0])
    with pytest.raises(InvalidHandler, match="give one of them name="):
        subscribe(**options[1])
    subscribe(**options[1], name="on_order.us")
    assert len(handlers.all_handlers()) == 2


def test_the_same_subscription_of_one_function_replaces_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apps, "ready", False)

    def subscribe() -> None:
        @handler("shop.placed", queue="mail", where={"tier": "gold"})
        def on_order(delivery: Delivery) -> None: ...

    subscribe()
    subscribe()
    assert len(handlers.all_handlers()) == 1


def test_a_decorator_without_wraps_gives_two_functions_one_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apps, "ready", False)

    def logged(function: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        def inner(delivery: Delivery) -> None:
            function(delivery)

        return inner

    handler("shop.placed")(logged(plain))
    with pytest.raises(InvalidHandler, match=r"if a decorator made both, it needs functools"):
        handler("shop.placed")(logged(another))
    assert len(handlers.all_handlers()) == 1


def test_functions_of_a_loop_with_other_values_do_not_replace_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apps, "ready", False)
    regions: list[str] = []

    def subscribe(region: str) -> None:
        @handler("shop.placed")
        def on_order(delivery: Delivery) -> None:
            regions.append(region)

    subscribe("eu")
    with pytest.raises(InvalidHandler, match="give one of them name="):
        subscribe("us")
    subscribe("eu")  # an equal function
    assert len(handlers.all_handlers()) == 1


def test_functions_of_a_loop_with_other_defaults_do_not_replace_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apps, "ready", False)

    def subscribe(region: str) -> None:
        @handler("shop.placed")
        def on_order(delivery: Delivery, region: str = region) -> None: ...

    subscribe("eu")
    with pytest.raises(InvalidHandler, match="give one of them name="):
        subscribe("us")


def test_methods_of_other_instances_do_not_replace_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apps, "ready", False)

    class Exporter:
        def export(self, delivery: Delivery) -> None: ...

    exporter = Exporter()
    handler("shop.placed", name="export")(exporter.export)
    handler("shop.placed", name="export")(exporter.export)
    with pytest.raises(InvalidHandler, match="give one of them name="):
        handler("shop.placed", name="export")(Exporter().export)


def test_a_helper_of_tests_may_subscribe_its_function_again() -> None:
    for pattern in "shop.placed", "shop.paid":

        @handler(pattern)
        def on_order(delivery: Delivery) -> None: ...

    [found] = handlers.all_handlers()
    assert found.patterns == ("shop.paid",)


def test_another_function_of_the_same_name_does_not_replace_it() -> None:
    run_module(SOURCE, "handlers.py")
    with pytest.raises(InvalidHandler, match="belongs to"):
        run_module("\n" + SOURCE, "handlers.py")
    with pytest.raises(InvalidHandler, match="belongs to"):
        run_module(SOURCE, "elsewhere.py")


def test_partials_with_one_name_do_not_replace_each_other() -> None:
    handler("a", name="it")(functools.partial(plain))
    with pytest.raises(InvalidHandler, match="belongs to"):
        handler("a", name="it")(functools.partial(another))


def test_the_routing_table_follows_the_registry() -> None:
    handler("a.b", name="one")(plain)
    before = handlers.table()
    assert handlers.table() is before
    handler("a.#", name="two")(another)
    assert [each.name for each in handlers.table().match("a.b", {})] == ["one", "two"]


def test_isolated_restores_the_registry() -> None:
    handler("a", name="outer")(plain)
    with handlers.isolated():
        handler("a", name="inner")(another)
        assert handlers.get("outer") is None
    with handlers.isolated(handlers.all_handlers()):
        handler("a", name="inner")(another)
        assert [each.name for each in handlers.all_handlers()] == ["outer", "inner"]
    assert [each.name for each in handlers.all_handlers()] == ["outer"]
