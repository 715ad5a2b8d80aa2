"""What tests of several scripts need."""

import sys

import pytest


@pytest.fixture
def refused(monkeypatch, capsys):
    """refused(main, *words): what a script says of a command line that it cannot use."""

    def run(main, *words):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return run


@pytest.fixture
def write_tree():
    """write_tree(folder, **files): a tree that is Megatron-LM in name only, with these unit test files."""

    def write(folder, **files):
        for name, text in {
            "megatron/core/__init__.py": "",
            "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 18\nPATCH = 2\nPRE_RELEASE = ''\n",
            "megatron/core/utils.py": "def is_fa_min_version(version): import flash_attn",
            **{f"tests/unit_tests/{name}.py": text for name, text in files.items()},
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    return write


@pytest.fixture
def tree(write_tree, tmp_path):
    write_tree(tmp_path / "tree", **{"optimizer/test_all": "def test_a(): ..."})
    return tmp_path / "tree"
