"""The words of MEGATRON_MTP_PATCHES and MEGATRON_MTP_PATCHES_ON_DRIFT."""

import pytest
from megatron_mtp_patches.engine import PatchError, Project
from megatron_mtp_patches.engine.selection import Selection, check_policy, select

PROJECT = Project(package="choice", library="Lib", library_package="lib", repository="example/lib")
IDS = ("one", "two", "three-four")


@pytest.mark.parametrize(
    "choice, selected",
    [
        ("all", set(IDS)),
        ("", set(IDS)),
        (" all ", set(IDS)),
        ("none", set()),
        ("two", {"two"}),
        (" two , three-four,", {"two", "three-four"}),
        ("two,two", {"two"}),
        ("-two", {"one", "three-four"}),
        ("-two, -three-four", {"one"}),
        ("-one,-two,-three-four", set()),
        ("all,-two", {"one", "three-four"}),
    ],
)
def test_select(choice, selected):
    selection = select(choice, IDS, PROJECT)
    assert (selection.ids, selection.profile) == (selected, "all")
    assert selection.named == {word.strip() for word in choice.split(",")}.intersection(IDS)


def test_a_profile_leaves_nothing_out_but_what_is_named():
    assert select("repairs", IDS, PROJECT) == Selection(frozenset(IDS), "repairs")
    assert select("repairs,-two", IDS, PROJECT) == Selection(frozenset({"one", "three-four"}), "repairs")


@pytest.mark.parametrize("choice, ids", [("repairs,one", set(IDS)), ("repairs, one, -two", {"one", "three-four"})])
def test_a_patch_can_be_added_to_the_profile(choice, ids):
    assert select(choice, IDS, PROJECT) == Selection(frozenset(ids), "repairs", frozenset({"one"}))


@pytest.mark.parametrize("choice", ["five", "one,five", "-five", "--one", "One", "one two"])
def test_an_unknown_word_is_an_error_that_names_the_command_that_lists_the_ids(choice):
    with pytest.raises(PatchError, match="unknown patch .* CHOICE and .*: `choice status`") as raised:
        select(choice, IDS, PROJECT)
    assert "three-four" not in str(raised.value)
    assert ("commas, not spaces, separate ids" in str(raised.value)) is (" " in choice)


@pytest.mark.parametrize(
    "choice", ["one,-two", "-one,one", "all,one", "all,all", "repairs,one,-one", "-one,repairs", "repairs,none"]
)
def test_taking_and_leaving_out_do_not_mix(choice):
    with pytest.raises(PatchError, match="mixes"):
        select(choice, IDS, PROJECT)


@pytest.mark.parametrize(
    "choice, part", [(",", "names no patch; CHOICE and apply"), ("none,one", "none alone"), ("none,-one", "none alone")]
)
def test_words_that_say_nothing_or_two_things(choice, part):
    with pytest.raises(PatchError, match=part):
        select(choice, IDS, PROJECT)


@pytest.mark.parametrize(
    "word, policy", [("raise", "raise"), ("warn", "warn"), ("skip", "skip"), ("", "raise"), (" warn ", "warn")]
)
def test_policies(word, policy):
    assert check_policy(word, "DRIFT") == policy


@pytest.mark.parametrize("policy", ["RAISE", "ignore"])
def test_an_unknown_policy_is_an_error_that_lists_them(policy):
    with pytest.raises(PatchError, match="DRIFT must be one of raise, warn, skip, not"):
        check_policy(policy, "DRIFT")
