"""Fingerprints mean the same on every Python that can parse the source."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from megatron_mtp_patches.engine import AddFlag, Override
from megatron_mtp_patches.engine.fingerprints import ABSENT, KnownSources, fingerprint
from megatron_mtp_patches.engine.new_release import make_known_sources, write_known_sources

# Everything whose syntax cls differs, or has differed, between Pythons.
EVERY_SYNTAX = r'''
import functools


def strings(a, w):
    """Docstring."""
    plain = f"{a}" f"{a!r:>{w}}" "tail" f"{{}}" f"{a=}" f"{a:}" f"{a:{w}.{w}}" f""
    more = f"{a['k']}", f"{a + 1!s}", "\N{BULLET}", 1_000, 1e3, 2j
    return plain, more, u"unicode", b"bytes", "joined " "text", 'it''s'


@functools.wraps(strings, updated=())
@(lambda f: f)
def calls(a, /, b=lambda x=1, *y, **z: (x, y), *args, c: int = 2, d, **kwargs) -> "int":
    first, *rest = [*args, *b(1)]
    {**kwargs, "k": a}
    a[1:2, ..., ::3] = rest[:-1]
    return print(*first, **kwargs, sep=""), a[(*rest, 1)], -1, not a, ...


async def control(a):
    async with a as b, a:
        async for x in a:
            await x
    while (n := len(b)) > 1:
        del b[0]
    else:
        pass
    try:
        raise ValueError from None
    except (ValueError, TypeError) as error:
        assert error, "text"
    finally:
        global g
        g = [i async for i in a if i if n]
    match a:
        case {"x": [1, *rest], **others} if rest:
            return rest
        case str() | int(real=2) | None:
            yield
        case (-1, 1 + 2j) as pair:
            yield pair
        case _:
            ...
    with (a as c, b as d):
        return


class Meta(type, metaclass=type):
    x: "int"
    y: int = 1
    (z): float = 2
    __slots__ = ()


@functools.total_ordering
class Data(Meta, flag=True):
    field: int = 0
'''
NAMES = ("strings", "calls", "control", "Meta", "Data", "absent")


PRINT = """
import sys
from megatron_mtp_patches.engine import AddField, Override
from megatron_mtp_patches.engine.fingerprints import fingerprint

for name in sys.argv[2:]:
    print(fingerprint(Override("syntax:" + name, ""), [sys.argv[1]]))
print(fingerprint(AddField("syntax:Data", "f", int, 0, ""), [sys.argv[1]]))
"""
# What any Python must print for NAMES, and for a field of Data.
KNOWN = [
    "5eb00ef95a250732",
    "3426c038c2b805bf",
    "5cc80363b3f6d487",
    "574086aaa1178ef5",
    "58739d8758c3e6b7",
    "absent",
    "a9199fcdfc6c3675",
]
PATCHES = Path(__file__).resolve().parents[2] / "patches"


def find_python(minor: int) -> str | None:
    """A Python 3.`minor`, from pyenv or the path; it needs no package."""
    root = os.environ.get("PYENV_ROOT", "~/.pyenv")
    of_pyenv = sorted(Path(root).expanduser().glob(f"versions/3.{minor}.*/bin/python"))
    return str(of_pyenv[-1]) if of_pyenv else shutil.which(f"python3.{minor}")


@pytest.fixture
def syntax(tmp_path):
    (tmp_path / "syntax.py").write_text(EVERY_SYNTAX, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("minor", [10, 11, 12, 13, 14])
def test_every_python_computes_the_same_fingerprints(syntax, minor):
    python = find_python(minor)
    if python is None:
        pytest.skip(f"no Python 3.{minor} at hand")
    environment = {**os.environ, "PYTHONPATH": str(PATCHES), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-c", PRINT, str(syntax), *NAMES], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == KNOWN


def test_each_definition_has_its_own_fingerprint():
    assert len(set(KNOWN)) == len(NAMES) + 1
    assert KNOWN[NAMES.index("absent")] == ABSENT


def test_known_sources_say_which_releases_share_a_source(library, tmp_path):
    for release, text in {"1.0": "original", "2.0": "original", "3.0": "older"}.items():
        folder = tmp_path / release
        folder.mkdir()
        source = (library.folder / "lib.py").read_text(encoding="utf-8").replace("original", text)
        source = source.replace("C", "D") if release == "1.0" else source
        (folder / "lib.py").write_text(source, encoding="utf-8")
    f, method = Override("lib:f", "overrides:f"), Override("lib:C.method", "overrides:method")
    flag = AddFlag("lib:make_parser", flag="--x", type=int, default=1, help="")
    sources = {release: [str(tmp_path / release)] for release in ("1.0", "2.0", "3.0")}
    known = make_known_sources((library.patch(method, flag), library.patch(f)), sources)
    assert known.releases == ("1.0", "2.0", "3.0")
    assert list(known.targets) == ["lib:C.method", "lib:f"], "an edit that is not checked needs none"
    assert list(known.targets["lib:f"].values()) == [["1.0", "2.0"], ["3.0"]]
    assert known.targets["lib:C.method"][ABSENT] == ["1.0"]

    file = tmp_path / "table.json"
    write_known_sources(known, file)
    table = KnownSources.read(file)
    assert table == known
    assert table.releases_with("lib:f", fingerprint(f, sources["3.0"])) == ["3.0"]
    assert table.releases_with("lib:f", fingerprint(f)) == ["1.0", "2.0"]
