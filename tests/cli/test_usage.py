"""Wrong usage is 2 and says what is right."""

from __future__ import annotations

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG


@pytest.mark.parametrize(
    "words, part",
    [
        ([], "required: command"),
        (["stauts"], "invalid choice: 'stauts'"),
        (["status", "--jsno"], "unrecognized arguments: --jsno"),
        (["explain"], "required: ID"),
        (["explain", "no-such-patch"], "invalid choice: 'no-such-patch'"),
        (["drift", "--against"], "expected one argument"),
        (["doctor", "now"], "unrecognized arguments: now"),
        (["run"], "required: SCRIPT"),
        (["run", "--device", "tpu", "x.py"], "invalid choice: 'tpu'"),
    ],
    ids=" ".join,
)
def test_wrong_usage(capsys, words, part):
    from megatron_mtp_patches.cli import main

    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert "usage: megatron-mtp-patches" in printed.err and part in printed.err


def test_an_unknown_id_lists_the_ids(capsys):
    from megatron_mtp_patches.cli import main

    with pytest.raises(SystemExit):
        main(["explain", "no-such-patch"])
    printed = capsys.readouterr().err
    assert all(patch.id in printed for patch in CATALOG)


def test_version(capsys):
    from megatron_mtp_patches.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == megatron_mtp_patches.__version__


def test_help_names_every_command(command):
    done = command("--help")
    assert done.returncode == 0
    assert all(f"\n    {name} " in done.stdout for name in ("status", "explain", "run", "doctor", "drift"))
