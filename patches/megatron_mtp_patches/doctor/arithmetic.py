"""Arithmetic as in bash's `$((...))`: whole numbers and variables, with + - * / % and brackets."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda one, other: int(one / other),  # bash rounds towards 0
    ast.Mod: lambda one, other: one - other * int(one / other),
}


def calculate(text: str, variables: Mapping[str, str]) -> int | None:
    """The value of an expression; None where it has anything else, or a variable that is unknown or no number."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, variables)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None


def _evaluate(node: ast.expr, variables: Mapping[str, str]) -> int:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, variables)
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_evaluate(node.left, variables), _evaluate(node.right, variables))
    if isinstance(node, ast.Name):
        return int(variables[node.id])
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(f"{ast.unparse(node)} is not arithmetic of whole numbers")
