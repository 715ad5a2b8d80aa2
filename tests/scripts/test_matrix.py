"""ci/matrix.toml names each test."""

from __future__ import annotations

from pathlib import Path

try:
    import tomllib
except ImportError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def test_each_file_of_tests_is_in_a_suite_or_an_environment():
    matrix = tomllib.loads((ROOT / "ci" / "matrix.toml").read_text(encoding="utf-8"))
    named = [ROOT / path for kind in ("suite", "environment") for one in matrix[kind] for path in one["tests"]]
    files = (ROOT / "tests").rglob("test_*.py")
    assert not [str(file) for file in files if not {file, *file.parents}.intersection(named)]
