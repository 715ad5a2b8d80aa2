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
