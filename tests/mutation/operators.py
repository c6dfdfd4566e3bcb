"""Small faults that can be put into a module: which there are, and the module with one of them.

The faults are those that people make: a bound off by one, a condition turned round, a line left out.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Change = Callable[[ast.AST], ast.AST]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Calls that only log: a fault in a message is not a fault of the run.
SPOKEN = {"Log", "warning", "info", "debug", "error", "trouble", "say"}


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        module: dotted name.
        line, statement: of the source, from 1: where the fault is, and where its statement begins.
        number: of the fault among those of its module.
        what: for people: the code before and after.
    """

    module: str
    line: int
    statement: int
    number: int
    what: str


def mutants(module: str, source: str) -> list[Mutant]:
    """All faults that can be put into a module."""
    found, tree = [], ast.parse(source)
    statements = {
        id(inner): statement.lineno
        for statement in ast.walk(tree)  # the outer ones come first
        if isinstance(statement, ast.stmt)
        for inner in ast.walk(statement)
    }
    for number, (node, change) in enumerate(_faults(tree)):
        what = f"{_short(ast.unparse(node))}  ->  {_short(ast.unparse(change(node)))}"
        found.append(Mutant(module, node.lineno, statements[id(node)], number, what))
    return found


def mutated(source: str, number: int) -> ast.Module:
    """The module with one of its faults."""
    tree = ast.parse(source)
    target, change = list(_faults(tree))[number]
    new = change(target)

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.copy_location(new, target) if node is target else self.generic_visit(node)

    Replace().visit(tree)
    return ast.fix_missing_locations(tree)


def _short(code: str) -> str:
    line = " ".join(code.split())
    return line if len(line) <= 60 else line[:57] + "..."


def _faults(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, Change]]:  # noqa: C901, PLR0912  a case for each kind of node
    """Where a fault can be put, and how; in the order of the source."""
    for node in _behaviour(tree):
        match node:
            case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
                yield node, _with("ops", [COMPARISONS[type(op)]()])
            case ast.BoolOp(op=op):
                other = ast.Or if isinstance(op, ast.And) else ast.And
                yield node, _with("op", other())
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, _becomes(operand)
            case ast.BinOp(op=op) if type(op) in ARITHMETIC:
                yield node, _with("op", ARITHMETIC[type(op)]())
            case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
                yield node, _with("op", ARITHMETIC[type(op)]())
            case ast.Constant(value=bool() as value):
                yield node, _with("value", not value)
            case ast.Constant(value=int() | float() as value):
                yield node, _with("value", value + 1)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield node, _with("func", ast.Name(CALLS[name], ast.Load()))
            case ast.If() | ast.While():
                yield node, _with("test", ast.Constant(False))
            case ast.IfExp(body=body):
                yield node, _becomes(body)
            case ast.Expr(value=ast.Call() | ast.YieldFrom() | ast.Yield()):
                yield node, _becomes(ast.Pass())
            case ast.Continue() | ast.Break():
                yield node, _becomes(ast.Pass())
            case ast.Return(value=ast.expr()) if not _is_none(node.value):
                yield node, _with("value", ast.Constant(None))


def _with(name: str, value: object) -> Change:
    def change(node: ast.AST) -> ast.AST:
        new = copy.copy(node)
        setattr(new, name, value)
        return new

    return change


def _becomes(other: ast.AST) -> Change:
    return lambda node: other


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _behaviour(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but types, defaults of dataclasses, and what is only said."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "bases", "type_params"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_spoken(child):
                continue
            yield child
            yield from _behaviour(child)


def _is_spoken(node: ast.AST) -> bool:
    """A text, an error's sentence, a line for the log, an assertion, an import, a name for types."""
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.BinOp(op=ast.BitOr(), right=ast.Name(id=name)):  # a union of types
            return name[0].isupper()
        case ast.Expr(value=ast.Yield(value=ast.Call(func=func)) | ast.Call(func=func)):
            return _name(func) in SPOKEN
        case ast.FunctionDef(name=name):
            return name in {"check_invariants", "__repr__", "__str__"}
        case ast.If(test=test):
            return _name(test) == "TYPE_CHECKING"
    return False


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
