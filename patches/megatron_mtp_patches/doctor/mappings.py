"""Read a YAML or JSON file as a mapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..engine import UsageError

SUFFIXES = (".yaml", ".yml", ".json")


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        UsageError: it cannot be read, or is empty.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"it cannot be read: {error}") from error
    if not text.strip():
        raise UsageError("it is empty")
    return text


def read_mapping(file: Path) -> dict[str, Any]:
    """The content of a file that ends in one of SUFFIXES; {} where it is no mapping.

    Raises:
        UsageError: it cannot be read, is empty, or is not what it ends in.
    """
    text = read_text(file)
    content = _parse_json(text) if file.suffix == ".json" else _parse_yaml(text)
    return content if isinstance(content, dict) else {}


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UsageError("reading YAML needs pyyaml (pip install pyyaml)") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"it is not YAML: {error}") from error


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"it is not JSON: {error}") from error
