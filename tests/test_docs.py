"""The README's Python snippets run in order, as one story; links and names on the pages exist."""

from __future__ import annotations

import pkgutil
import re
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from django_mq import broadcast
from django_mq.conf import Settings, find_errors
from django_mq.handlers import isolated
from django_mq.messages.classes import isolated as isolated_classes
from django_mq.queues.doctor.findings import IDS
from django_mq.testing import answering, drain
from testproject.shop.models import Invoice, Order, Product

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
#: Pages about the code: every module and name on them exists.
ABOUT_CODE = [ROOT / f"docs/{name}.md" for name in ("internals", "glossary", "style")]


def snippets(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def story() -> Any:
    """Return the names that the README's snippets define, run one after another."""
    names: dict[str, Any] = {"__name__": "readme"}
    sys.modules["shop.models"] = sys.modules["testproject.shop.models"]
    sys.modules["shop"] = sys.modules["testproject.shop"]
    with isolated():
        for code in snippets(ROOT / "README.md", "python"):
            exec(compile(code, "README.md", "exec"), names)  # noqa: S102
        yield names
    del sys.modules["shop.models"], sys.modules["shop"]


@pytest.mark.django_db
def test_the_story_of_the_readme(story: dict[str, Any]) -> None:
    product = Product.objects.create(name="chair", price=20, stock=1)
    story["place_order"](Order(product=product, price=20, quantity=2, email="ada@example.com"))
    assert drain() == 1
    assert Invoice.objects.get().total == 40
    story["remind"](Order.objects.get())


@pytest.mark.django_db
def test_the_questions_of_the_readme(story: dict[str, Any]) -> None:
    products = [Product.objects.create(name=f"{n}", price=1, stock=n) for n in (3, 1, 2)]
    with answering():
        assert story["stock_of"](products) == [3, 1, 2]


@pytest.mark.django_db
def test_the_tests_of_the_readme_pass(story: dict[str, Any]) -> None:
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(story["RemindTest"])
    result = unittest.TestResult()
    suite.run(result)
    assert result.testsRun == 2
    assert not result.failures, result.failures
    assert not result.errors, result.errors


@pytest.mark.django_db
def test_the_page_of_typed_messages() -> None:
    names: dict[str, Any] = {"__name__": "typed_messages"}
    with isolated(), isolated_classes():
        page = ROOT / "docs/typed-messages.md"
        for code in snippets(page, "python"):
            exec(compile(code, page.name, "exec", dont_inherit=True), names)  # noqa: S102
        names["place_order"](7)
        assert drain() == 3
        assert names["invoices"] == [7]
        with transaction.atomic():
            broadcast("shop.stock.changed", {"product": 5, "count": {"left": 1}})
        got: list[Any] = []

        def stock(event: Any) -> None:
            got.append(event)

        stock.__annotations__["event"] = names["StockChanged"]
        names["handler"]("shop.stock.changed")(stock)
        assert drain() == 1
        assert got == [names["StockChanged"](product_id=5, left=1)]


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        found = page.parent / path if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_page_is_on_the_site() -> None:
    """GitHub shows any page; the site only those in a table of contents."""
    listed = {
        (page.parent / f"{name}.md").resolve()
        for page in ROOT.glob("docs/**/index.md")
        for toctree in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), re.M | re.S)
        for name in re.findall(r"^[\w/-]+$", toctree, re.MULTILINE)
    }
    assert listed == set(ROOT.glob("docs/**/*.md")) - {ROOT / "docs/index.md"}


@pytest.mark.parametrize("page", ABOUT_CODE, ids=lambda page: page.name)
def test_named_modules_exist(page: Path) -> None:
    paths = re.findall(r"\b[\w/]+/\w+\.py\b", page.read_text())
    assert paths
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "django_mq" / path).exists(), path


@pytest.mark.parametrize("page", ABOUT_CODE, ids=lambda page: page.name)
def test_dotted_names_exist(page: Path) -> None:
    names = re.findall(r"\bdjango_mq(?:\.\w+)+", page.read_text())
    assert names
    for name in names:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", ABOUT_CODE, ids=lambda page: page.name)
def test_named_functions_exist(page: Path) -> None:
    names = re.findall(r"`((?:\w+/)+\w+)\.([\w.]+)\(\)`", page.read_text())
    assert names
    for module, name in names:
        pkgutil.resolve_name(f"django_mq.{module.replace('/', '.')}:{name}")


def test_named_threads_exist() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "django_mq").rglob("*.py"))
    names = re.findall(r"`mq-(\w[\w-]*?)(?:-N)?`", (ROOT / "docs/internals.md").read_text())
    assert len(names) > 10
    for name in names:  # a name may be put together: "mq-" and what the thread does
        assert re.search(rf'"(mq-)?{name}["-]', code), name


def test_all_settings_are_documented() -> None:
    reference = (ROOT / "docs/reference.md").read_text()
    named = set(re.findall(r"`([A-Z_]{4,})`", reference))
    fields = {name.upper() for name in Settings.__dataclass_fields__ if name != "unlisted"}
    assert fields == named & fields
    assert not find_errors({"REQUIRE_ATOMIC": True})


@pytest.mark.django_db
def test_documented_roles_name_real_tables() -> None:
    text = (ROOT / "docs/roles.md").read_text()
    tables = set(re.findall(r"\bdjango_mq_\w+", text))
    assert len(tables) > 5
    for table in tables:
        with connection.cursor() as cursor:
            cursor.execute("select to_regclass(%s)", [table])
            assert cursor.fetchone() != (None,), table


def test_all_checks_are_documented() -> None:
    paths = [*ROOT.glob("django_mq/checks/*.py"), *ROOT.glob("django_mq/contrib/**/*.py")]
    ids = {id for path in paths for id in re.findall(r"\b[EWI]0\d\d\b", path.read_text())}
    documented = set(
        re.findall(r"django_mq\.([EWI]\d{3})", (ROOT / "docs/reference.md").read_text())
    )
    assert ids == documented


def test_all_findings_of_the_doctor_are_documented() -> None:
    paths = ROOT.glob("django_mq/queues/doctor/*.py")
    ids = {id for path in paths for id in re.findall(r'"(D0\d\d)"', path.read_text())}
    operating = (ROOT / "docs/operating.md").read_text()
    assert ids == IDS, "findings.IDS and the findings that are made"
    assert ids == set(re.findall(r"^\| (D\d{3}) \|", operating, re.MULTILINE))
