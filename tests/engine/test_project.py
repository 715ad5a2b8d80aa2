"""The address of an upstream change."""

from megatron_mtp_patches.engine import PullRequest

from .conftest import PROJECT


def test_a_change_is_one_of_the_library_unless_it_names_another_repository():
    change, elsewhere = PullRequest(7), PullRequest(7, repository="example/other")
    assert (str(change), PROJECT.pull_request_url(change)) == ("#7", "https://github.com/example/lib/pull/7")
    assert (str(elsewhere), PROJECT.pull_request_url(elsewhere)) == (
        "other#7",
        "https://github.com/example/other/pull/7",
    )
