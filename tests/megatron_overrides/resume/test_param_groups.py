"""Each parameter group of a run finds its own counterpart among those of a checkpoint."""

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("keep-learning-rates-at-resume")]


def group(name, max_lr, **settings):
    keys = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return {**keys, "params": [name], "lr": 0.5 * max_lr, "max_lr": max_lr, **settings}


def names(pairs):
    return pairs and [one["params"][0] for one in pairs]


@pytest.mark.parametrize(
    "current, saved, expected",
    [
        ([group("a", 1.0), group("b", 2.0)], [group("B", 2.0), group("A", 1.0)], ["A", "B"]),
        ([group("a", 3.0), group("b", 4.0)], [group("A", 1.0), group("B", 2.0)], ["A", "B"]),
        ([group("a", 0.1), group("b", 0.01)], [group("A", 1.0), group("B", 0.1)], ["A", "B"]),
        ([group("a", 3.0, wd_mult=0.0), group("b", 4.0)], [group("B", 2.0), group("A", 1.0, wd_mult=0.0)], ["A", "B"]),
        (
            [group("a", 1.0, eps=1e-8), group("b", 1.0, eps=1e-5)],
            [group("B", 1.0, eps=1e-5), group("A", 1.0, eps=1e-8)],
            ["A", "B"],
        ),
        ([group("a", 1.0)], [group("A", 1.0, min_lr=None)], ["A"]),
        (
            [group("a", 1.0, start_wd=0.1), group("b", 1.0)],
            [group("B", 1.0, tag="B"), group("A", 1.0, tag="A", start_wd=0.1)],
            ["A", "B"],
        ),
        ([group("a", 3.0)], [group("A", 1.0), group("B", 2.0)], None),
        ([group("a", 1.0)], [group("A", 1.0, wd_mult=0.0)], None),
    ],
    ids=[
        "other order",
        "other rates",
        "rates of each other",
        "multipliers",
        "eps",
        "None is absent",
        "of the checkpoint alone",
        "another number of groups",
        "no group",
    ],
)
def test_pairs(current, saved, expected):
    from megatron_overrides.resume.param_groups import pair_groups

    assert names(pair_groups(current, saved)) == expected


def test_nemo_calls_the_multipliers_otherwise():
    from megatron_overrides.resume.param_groups import pair_groups

    saved = group("A", 1.0)
    saved["pre_wd_mult"] = saved.pop("wd_mult")
    assert names(pair_groups([group("a", 2.0)], [saved])) == ["A"]


def test_a_group_that_was_empty_has_the_step_of_the_others():
    from megatron_overrides.resume.param_groups import with_steps

    groups = [{"step": 6, "lr": 1.0}, {"lr": 2.0}, {"step": None}]
    assert with_steps(groups) == [{"step": 6, "lr": 1.0}, {"lr": 2.0, "step": 6}, {"step": 6}]
    assert with_steps(groups[1:]) == groups[1:]
