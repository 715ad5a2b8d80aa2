"""Each program sees its defect in a Megatron that has it, not in a later one that has not, nor with the patch that is
said to remove it: with this one alone, because `doctor` names no other.

A program runs on the newest release that has its defect, and unpatched on the oldest after it; with --everywhere both
ways on each from the first that has it, and again with all patches. One that needs a package that is not here does not.
"""

import pytest
from megatron_mtp_patches.defects.catalog import known_defects, read_releases, releases_with
from megatron_mtp_patches.megatrons.installed import find_releases
from megatron_mtp_patches.reproductions import needs, runner

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.guards(
        "add-fsdp-gradients-of-single-replicas",
        "replace-fsdp-gradients-by-their-mean",
        "scale-sparse-indexer-loss",
        "reduce-tensors-with-gaps",
        "keep-outputs-until-sent",
        "save-own-state-of-each-param",
        "quantize-weights-of-each-step",
    ),
]


def pytest_generate_tests(metafunc):
    """`defect` has a program that runs here; `patched_defect` one that runs here with `patches`, too.

    `defect_of_more` has one that needs a package that is not here.
    """
    (here,) = find_releases()
    everywhere = metafunc.config.getoption("everywhere")
    shown = [one for one in known_defects() if runner.find_program(one.id) and runs_on(one, here, everywhere)]
    defects = [one for one in shown if not needs.find_missing(runner.find_program(one.id))]
    more = [one for one in shown if one not in defects and one.patch and here in releases_with(one)]
    patched = {one.id: (one, patches_of(one)) for one in defects if everywhere or here in releases_with(one)}
    if everywhere:
        patched |= {f"{one.id}, all patches": (one, "all") for one, patch in patched.values() if patch != "all"}
    for name, chosen in (("defect", defects), ("defect_of_more", more)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, chosen, ids=lambda defect: defect.id)
    if "patched_defect" in metafunc.fixturenames:
        metafunc.parametrize("patched_defect, patches", list(patched.values()), ids=list(patched))


def patches_of(defect):
    """The patch that removes it, with that of the defect which has to be removed before; all if none does."""
    before = [one.patch for one in known_defects() if defect.after and one.id == defect.after]
    return ",".join((defect.patch, *before)) or "all"


def runs_on(defect, release, everywhere):
    order = [one for one in read_releases() if one != "main"]
    with_defect = [order.index(one) for one in releases_with(defect) if one in order]
    if not with_defect or release not in order:
        return False
    here = order.index(release)
    return here >= with_defect[0] if everywhere else here in (with_defect[-1], with_defect[-1] + 1)


def test_megatron_as_it_is(defect, release):
    outcome = runner.run(runner.find_program(defect.id))
    assert outcome.is_right is (release not in releases_with(defect)), outcome


def test_with_the_patches(patched_defect, patches, release):
    outcome = runner.run(runner.find_program(patched_defect.id), patches)
    assert outcome.is_right is (bool(patched_defect.patch) or release not in releases_with(patched_defect)), outcome


def test_a_program_needs_what_it_says(defect_of_more):
    """Without it the program does not show that the patches remove the defect."""
    program = runner.find_program(defect_of_more.id)
    assert not runner.run(program, "all").is_right or runner.run(program).is_right


def test_each_program_is_of_a_known_defect():
    names = {one.id.lower().replace("-", "_") for one in known_defects()}
    assert {name for name in runner.program_names()} <= names


def test_what_is_reproduced_by_a_program_is_said_to_be():
    assert {one.evidence for one in known_defects() if runner.find_program(one.id)} <= {"reproduced"}


def test_an_error_and_a_hang_are_outcomes():
    def fail():
        raise ValueError("for a reason\nand more")

    def hang():
        import time

        time.sleep(60)

    assert runner.run_on_ranks(1, fail, 20.0, "a step") == [("a step", "ValueError: for a reason", False)]
    assert runner.run_on_ranks(1, hang, 0.5, "a step") == [("a step", "nothing within 0 s", False)]


@pytest.mark.parametrize(
    "expected, seen, same",
    [(1.0, 1.00001, True), (1.0, 1.001, False), ([1, "a"], [1, "a"], True), ([1], [1, 2], False), ("a", "b", False)],
)
def test_numbers_may_be_rounded(expected, seen, same):
    assert runner.is_same(expected, seen) is same
