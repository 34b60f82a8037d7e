"""Find each `event` that the package logs, with its levels and fields, in the source.

A record's event is a literal: in the log call, in a branch of a condition, in a table, or as the
argument of a function that logs it. Each literal is found together with the choices that lead to
it, so that the level and the event of one call are those of the same branch and the same caller.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

#: Which branch of a condition, or which caller of a function, a value is of.
Choices = dict[str, str]
Values = list[tuple[str, Choices]]
Fields = frozenset[str]

METHODS = ("debug", "info", "warning", "error", "critical")
#: The class whose `name` and `level` a log call takes: they are the arguments of its calls.
SIGNAL = "LoggedSignal"


@dataclass(frozen=True)
class Place:
    """Where an expression is: its module, and the function around it."""

    module: Path
    tree: ast.Module
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None


class Source:
    """The calls of a package, by the name of the function they call."""

    def __init__(self, folder: Path) -> None:
        self.calls: dict[str, list[tuple[ast.Call, Place]]] = defaultdict(list)
        #: Every dict with the key "event"; `records()` removes those that it has understood.
        self.unread: set[ast.expr] = set()
        for path in sorted(folder.rglob("*.py")):
            tree = ast.parse(path.read_text())
            self._walk(tree, Place(path, tree))

    def _walk(self, node: ast.AST, place: Place) -> None:
        if isinstance(node, ast.Dict) and _item(node, "event") is not None:
            self.unread.add(node)
        if isinstance(node, ast.Call):
            self.calls[_name_of(node.func)].append((node, place))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            place = Place(place.module, place.tree, node)
        for child in ast.iter_child_nodes(node):
            self._walk(child, place)

    def records(self) -> Iterator[tuple[str, str, Fields]]:
        """Yield the event, the level and the fields of each log call that has an event."""
        for method in (*METHODS, "log"):
            for call, place in self.calls[method]:
                extra = next((each.value for each in call.keywords if each.arg == "extra"), None)
                if isinstance(extra, ast.Name):
                    extra = _assigned(extra.id, place.function)
                if extra is None:
                    continue
                self.unread.discard(extra)
                level = call.args[0] if method == "log" else ast.Constant(method.upper())
                both = ast.Tuple([_item(extra, "event") or extra, level], ast.Load())
                for text, choices in self.values(both, place):
                    event, name = text.split()
                    yield event, name, frozenset(self._fields(extra, place, choices))

    def _fields(self, extra: ast.expr, place: Place, choices: Choices) -> Iterator[str]:
        """Yield the names of the fields, except `event`; those of other dicts begin with `**`."""
        assert isinstance(extra, ast.Dict)
        for key, value in zip(extra.keys, extra.values, strict=True):
            match key, value:
                case ast.Constant("event"), _:
                    pass
                case ast.Constant(str(name)), _:
                    yield name
                case None, ast.Name("extra"):  # the keywords of a call of this function
                    assert place.function is not None
                    called = place.function.name
                    chosen = choices[f"{place.module}: {called}"]
                    for call, where in self.calls[called]:
                        if f"{where.module}:{call.lineno}" == chosen:
                            yield from (each.arg for each in call.keywords if each.arg)
                case _:
                    yield f"**{ast.unparse(value)}"

    def values(self, node: ast.expr | None, place: Place) -> Values:
        """Return the texts that `node` may be; those of a tuple are joined by spaces."""
        match node:
            case ast.Constant(str(text)):
                return [(text, {})]
            case ast.Tuple([first, second]):
                return [
                    each
                    for (one, choices), (other, more) in product(
                        self.values(first, place), self.values(second, place)
                    )
                    for each in _merged((f"{one} {other}", choices), more)
                ]
            case ast.IfExp(test, yes, no):
                key = f"{place.module}: {ast.dump(test)}"
                return _chosen(
                    (key, name, self.values(each, place))
                    for name, each in (("yes", yes), ("no", no))
                )
            case ast.Attribute(ast.Name("logging"), level):
                return [(level, {})]
            case ast.Attribute(ast.Name("signal"), "name" | "level" as part):
                return _chosen(
                    (SIGNAL, str(call.lineno), self._of_signal(call, part, where))
                    for call, where in self.calls[SIGNAL]
                )
            case ast.Subscript(ast.Name(table)):
                found = _assigned(table, place.tree)
                assert isinstance(found, ast.Dict), table
                return [each for value in found.values for each in self.values(value, place)]
            case ast.Name(name):
                return self._name(name, place)
        raise AssertionError(f"{place.module}: {ast.dump(node) if node else 'nothing'}")

    def _of_signal(self, call: ast.Call, part: str, place: Place) -> Values:
        if part == "level" and len(call.args) == 1:
            return [("INFO", {})]
        return self.values(call.args[0 if part == "name" else 1], place)

    def _name(self, name: str, place: Place) -> Values:
        if (assigned := _assigned(name, place.function)) is not None:
            return self.values(assigned, place)
        return self._argument(name, place)

    def _argument(self, name: str, place: Place) -> Values:
        """Return what callers pass as parameter `name` of the function of this place."""
        assert place.function is not None
        called = place.function.name
        names = [each.arg for each in place.function.args.args]
        position = names.index(name) - (names[0] == "self")
        callers = [
            (call, where)
            for call, where in self.calls[called]
            if not called.startswith("_") or where.module == place.module
        ]
        assert callers, f"nothing calls {called}()"
        return _chosen(
            (
                f"{place.module}: {called}",
                f"{where.module}:{call.lineno}",
                self.values(_passed(call, position, name), where),
            )
            for call, where in callers
        )


def logged_events(folder: Path) -> set[tuple[str, str, Fields]]:
    """Return each event that the package in `folder` logs, with each of its levels and fields.

    Fails for an event that it cannot find out.
    """
    source = Source(folder)
    found = set(source.records())
    assert not source.unread, [ast.unparse(each) for each in source.unread]
    return found


def _name_of(function: ast.expr) -> str:
    """Return the last name of the called function."""
    match function:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _passed(call: ast.Call, position: int, name: str) -> ast.expr | None:
    by_name = (each.value for each in call.keywords if each.arg == name)
    return call.args[position] if position < len(call.args) else next(by_name, None)


def _item(table: ast.expr, key: str) -> ast.expr | None:
    match table:
        case ast.Dict(keys, values):
            names = [getattr(each, "value", None) for each in keys]
            return values[names.index(key)] if key in names else None
    return None


def _assigned(name: str, scope: ast.AST | None) -> ast.expr | None:
    """Return what a function or module assigns to a variable."""
    assert scope is not None
    for each in ast.walk(scope):
        match each:
            case ast.Assign([ast.Name(target)], value):
                if target == name:
                    return value
    return None


def _merged(found: tuple[str, Choices], choices: Choices) -> Values:
    """Return a value with more choices, or nothing if they contradict its own."""
    text, own = found
    both = {**own, **choices}
    return [(text, both)] if all(both[key] == own[key] for key in own) else []


def _chosen(options: Iterable[tuple[str, str, Values]]) -> Values:
    return [
        each
        for key, name, found in options
        for value in found
        for each in _merged(value, {key: name})
    ]
