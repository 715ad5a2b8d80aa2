"""Rows that are kept in a JSON file, a line for each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows; none where there is no such file."""
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def write_rows(rows: Iterable[Any], file: Path) -> None:
    """Write named tuples."""
    lines = ",\n".join(json.dumps(row._asdict()) for row in rows)
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
