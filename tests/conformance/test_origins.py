"""Whose change a patch is, and until when it is needed."""

from __future__ import annotations

import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.defects.declare import Defect, Sign
from megatron_mtp_patches.engine import Patch, PullRequest
from megatron_mtp_patches.engine.state import State
from megatron_mtp_patches.megatrons import origins
from megatron_mtp_patches.megatrons.known import VERSIONS
from megatron_mtp_patches.megatrons.origins import Origin
from megatron_mtp_patches.megatrons.states_by_release import state_in

pytestmark = pytest.mark.forked("python")

OLD, NEW = PullRequest(1, "0.17.0"), PullRequest(2, "main")
OPEN, CLOSED, SINCE = PullRequest(3), PullRequest(4, ended="closed"), PullRequest(5, ended="merged after 2026-08-22")
ELSEWHERE = PullRequest(6, "0.4.0", repository="other/Library")
REPAIRS = ("Something.",)


def defect(identifier, state="unreported", *links):
    return Defect(identifier, "It is wrong", 3, Sign("m:f"), bool, "--x", "read", state=state, more_links=links)


UNREPORTED, ANOTHER = defect("a"), defect("b")
REPORTED = defect("c", "open", "NVIDIA/Megatron-LM#7", "other/Library#8")
PROPOSED, AGAIN = defect("ML-3", "open"), defect("ML-2", "open")
HALF_REPAIRED, REPAIRED = defect("ML-5", "fixed on main in bf16, open in fp8"), defect("ML-1", "fixed in 0.17.0")


@pytest.mark.parametrize(
    "upstream, repairs, defects, origin, whose, release, retire_when",
    [
        ((OLD, NEW), (), (REPAIRED,), "merged",
         "upstream's #1 (since 0.17.0), #2 (on main)", "0.17.1", "Megatron 0.17.1 has it"),
        ((NEW, OLD), (), (), "merged",
         "upstream's #2 (on main), #1 (since 0.17.0)", "main", "a release has it, as upstream's main does"),
        ((ELSEWHERE,), (), (), "merged", "upstream's Library#6 (since 0.4.0)", None, "library 0.4.0 has it"),
        ((SINCE,), (), (), "merged", "upstream's #5 (merged after 2026-08-22)", None, "a release has #5"),
        ((OLD,), REPAIRS, (), "merged and repaired",
         "upstream's #1 (since 0.17.0), with repairs of ours", None, "upstream repairs its version as this patch does"),
        ((OLD,), REPAIRS, (UNREPORTED, ANOTHER, REPAIRED), "merged and repaired",
         "upstream's #1 (since 0.17.0), with repairs of ours (nobody has reported the 2 defects)", None,
         "upstream repairs its version as this patch does: a and b"),
        ((OLD, NEW), REPAIRS, (AGAIN,), "merged and repaired",
         "upstream's #1 (since 0.17.0), #2 (on main), with repairs of ours (reported in #2)", None,
         "upstream repairs its version as this patch does: ML-2 (#2)"),
        ((SINCE,), (), (HALF_REPAIRED, UNREPORTED), "merged and repaired",
         "upstream's #5 (merged after 2026-08-22), with repairs of ours (1 of the 2 defects is reported in #5)", None,
         "a release has #5 and upstream repairs ML-5 (#5) and a"),
        ((OPEN, PullRequest(9, twin_of=3)), (), (PROPOSED,), "open",
         "upstream's #3 (open), #9 (the same as #3)", None, "a release has #3"),
        ((OPEN, SINCE), REPAIRS, (PROPOSED,), "open",
         "upstream's #3 (open), #5 (merged after 2026-08-22), with repairs of ours", None,
         "a release has #3 and #5, with the repairs of this patch"),
        ((OPEN,), (), (REPORTED,), "open",
         "upstream's #3 (open), with repairs of ours (reported in #7, other/Library#8)", None,
         "a release has #3 and upstream repairs c (#7, other/Library#8)"),
        ((CLOSED,), (), (), "closed", "upstream's #4 (closed)", None, "never by itself: upstream has closed #4"),
        ((), (), (REPORTED,), "ours, reported",
         "ours; reported in #7, other/Library#8", None, "upstream repairs c (#7, other/Library#8)"),
        ((), (), (UNREPORTED,), "ours, unreported", "ours; nobody has reported the defect", None, "upstream repairs a"),
        ((), (), (REPORTED, UNREPORTED, ANOTHER), "ours, partly reported",
         "ours; 1 of the 3 defects is reported in #7, other/Library#8", None,
         "upstream repairs c (#7, other/Library#8), a and b"),
        ((), (), (), "ours", "ours", None, "never by itself: no pull request has it"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_patch(monkeypatch, upstream, repairs, defects, origin, whose, release, retire_when):
    patch = Patch("it", "Do it", (), upstream, repairs=repairs, package="library" if upstream == (ELSEWHERE,) else "")
    monkeypatch.setattr(origins, "removed_by", lambda patch: list(defects))
    assert origins.origin_of(patch) == origin
    assert origins.describe_origin(patch, "{}".format) == whose
    assert origins.retired_in(patch) == release
    assert origins.describe_retirement(patch, "{}".format) == retire_when


def test_links_lead_to_pull_requests_and_reports(monkeypatch):
    monkeypatch.setattr(origins, "removed_by", lambda patch: [REPORTED])
    whose = origins.describe_origin(Patch("it", "Do it", (), (OPEN,)), "[{}]({})".format)
    assert "[#3](https://github.com/NVIDIA/Megatron-LM/pull/3)" in whose
    assert "[other/Library#8](https://github.com/other/Library/issues/8)" in whose


def test_the_origins_of_all_patches_agree_with_their_states():
    counts = origins.count_origins(CATALOG)
    assert set(counts) == set(Origin) and counts.total() == len(CATALOG)
    for patch in CATALOG:
        states = {state_in(patch, release) for release in VERSIONS}
        assert State.NATIVE not in states or origins.origin_of(patch) is Origin.MERGED
        assert State.REPAIRED not in states or origins.origin_of(patch) is Origin.REPAIRED
