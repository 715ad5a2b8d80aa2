"""The folders of the package are few, and import each other in one direction."""

import pytest

from scripts import structure


def test_folders_are_few_and_import_in_one_direction(capsys):
    assert structure.main() == 0, capsys.readouterr().out


@pytest.fixture
def package(tmp_path):
    """package({file: text}): a package of these files; a folder named twice keeps what it had."""

    def write(files):
        for name, text in files.items():
            file = tmp_path / "pkg" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.with_name("__init__.py").touch()
            file.write_text(text)
        return tmp_path / "pkg"

    return write


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os", ""),
        ("import other.high", ""),
        ("from ..high.a import x", "in a circle, low > high: low/b.py:1\n"),
        ("from .. import high", "in a circle, low > high: low/b.py:1\n"),
        (
            "def f():\n  if x:\n    import pkg.loose",
            "in a circle, low > loose: low/b.py:3 in a function\n",
        ),
    ],
)
def test_an_import_in_a_circle_is_named(package, capsys, text, said):
    files = {"high/a.py": "from ..loose import y", "loose.py": "from .low.b import z", "low/b.py": text}
    assert structure.main(package(files)) == bool(said)
    assert said in capsys.readouterr().out


def test_a_chain_is_as_long_as_its_folders(package, capsys):
    """Loose modules are links of a chain, and do not make it longer."""
    most = structure.LONGEST_CHAIN
    files = {f"f{number}/m.py": f"from ..f{number + 1} import m" for number in range(most)} | {f"f{most}/m.py": ""}
    assert structure.main(package(files)) == 1
    assert f"has {most + 1}, at most {most}: f0 > f1" in capsys.readouterr().out
    assert structure.main(package({"f3/m.py": "from .. import loose", "loose.py": "from . import f4"})) == 1
    assert structure.main(package({"f3/m.py": "from .. import loose", "loose.py": "from . import f5"})) == 0


def test_folders_are_counted(package, capsys):
    most = structure.MOST_FOLDERS
    assert structure.main(package({f"f{number}/m.py": "" for number in range(most)})) == 0
    assert structure.main(package({"another/m.py": ""})) == 1
