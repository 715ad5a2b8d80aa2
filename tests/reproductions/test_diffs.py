"""The diff of a defect removes it, without a patch: its program, which sees the defect without, is right.

The function gets the code that the rewritten source has. On the newest release that has the defect; with --everywhere
on each.
"""

import functools
import importlib
from pathlib import Path

import pytest
from megatron_mtp_patches.defects.catalog import known_defects, releases_with
from megatron_mtp_patches.defects.rewriting import rewrite
from megatron_mtp_patches.megatrons.installed import find_releases
from megatron_mtp_patches.reproductions import runner

pytestmark = pytest.mark.forked("megatron")


def pytest_generate_tests(metafunc):
    """`defect` has a diff, and is in this release."""
    (here,) = find_releases()
    everywhere = metafunc.config.getoption("everywhere")
    releases = {one: [name for name in releases_with(one) if name != "main"] for one in known_defects() if one.diff}
    chosen = [one for one, names in releases.items() if here in (names if everywhere else names[-1:])]
    metafunc.parametrize("defect", chosen, ids=lambda defect: defect.id)


def test_the_program_is_right_with_the_diff(defect):
    bring_in(defect.diff)
    outcome = runner.run(runner.find_program(defect.id))
    assert outcome.is_right, outcome


def bring_in(diff):
    module = importlib.import_module(diff.module)
    *classes, name = diff.target.partition(":")[2].split(".")
    code = compile(rewrite(Path(module.__file__).read_bytes(), diff), module.__file__, "exec")
    for part in (*classes, name):
        code = next(one for one in code.co_consts if getattr(one, "co_name", None) == part)
    function = functools.reduce(getattr, (*classes, name), module)
    function.__code__ = code
