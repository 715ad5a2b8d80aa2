"""The weight of the MTP loss at each point of a schedule, against numbers by hand; and schedules that are refused."""

import pytest

from megatron_overrides.mtp.loss_weight.schedule import Progress, Schedule

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("schedule-mtp-loss-weight")]


@pytest.mark.parametrize(
    "text, style, run, expected",
    [
        ("0:0.3", "linear", {"train_iters": 4}, [0.3] * 4),
        ("0:0.3,60%:0.1", "step", {"train_iters": 10}, [0.3] * 6 + [0.1] * 4),
        ("0:0.3,60%:0.1", "step", {"train_iters": 4}, [0.3] * 3 + [0.1]),
        ("0%:0.3, 33.3% : 0.1", "step", {"train_iters": 1000}, [0.3] * 333 + [0.1] * 667),
        ("0:0,2:0.5,3:1e-1", "step", {"train_iters": None}, [0.0, 0.0, 0.5, 0.1, 0.1]),
        ("0:1,4:0,6:1", "linear", {"train_iters": None}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.5, 1.0, 1.0]),
        ("0:0.25,50%:0.75", "linear", {"train_iters": 8}, [0.25, 0.375, 0.5, 0.625, 0.75, 0.75, 0.75, 0.75]),
        ("0:1,100%:0", "linear", {"train_iters": 4}, [1.0, 0.75, 0.5, 0.25]),
    ],
)
def test_the_weight_of_each_iteration(text, style, run, expected):
    schedule = Schedule.parse(text, style)
    weights = [schedule.weight(Progress.of_run(done, 0, train_samples=None, **run)) for done in range(len(expected))]
    assert weights == expected


def test_per_cent_are_those_of_the_samples_if_the_run_counts_samples():
    """The batch grows, so a quarter of the samples comes later than a quarter of the iterations."""
    done = (0, 2, 6)
    runs = [Progress.of_run(number, samples, train_iters=3, train_samples=12) for number, samples in enumerate(done)]
    assert [Schedule.parse("0:0.3,25%:0.1").weight(run) for run in runs] == [0.3, 0.3, 0.1]
    assert [Schedule.parse("0:0.3,1:0.1").weight(run) for run in runs] == [0.3, 0.1, 0.1]


def test_per_cent_are_not_rounded():
    for tenths in range(1, 1001):
        schedule = Schedule.parse(f"0:0.3,{tenths / 10}%:0.1")
        weights = [schedule.weight(Progress.of_run(done, 0, 1000, None)) for done in (tenths - 1, tenths)]
        assert weights == [0.3, 0.1]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "it cannot be read as points"),
        ("0.3", "it cannot be read as points"),
        ("0:0.3,,60%:0.1", "it cannot be read as points"),
        ("0:0.3;60%:0.1", "it cannot be read as points"),
        ("0:0.3,1/0:0.1", "it cannot be read as points"),
        ("0:0.3,nan:0.1", "it cannot be read as points"),
        ([(0, 0.3)], "it cannot be read as points"),
        ("100:0.3", "the first point is not 0"),
        ("0:0.3,20:0.2,20:0.1", "the points do not ascend"),
        ("0:0.3,-5:0.1", "the points do not ascend"),
        ("0:0.3,20:0.2,60%:0.1", "some points are in per cent, others in iterations"),
        ("0:0.3,101%:0.1", "a point is over 100 %"),
        ("0:0.3,0.6:0.1", "a point is no whole number of iterations"),
        ("0:-0.3", "a weight is negative, or is no finite number"),
        ("0:nan", "a weight is negative, or is no finite number"),
        ("0:0.3,9:inf", "a weight is negative, or is no finite number"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, reason):
    with pytest.raises(ValueError, match=rf"--mtp-loss-scaling-schedule .*: {reason}\. Give points START:WEIGHT"):
        Schedule.parse(text)


def test_per_cent_of_a_run_without_a_length_are_refused():
    schedule = Schedule.parse("0:0.3,60%:0.1")
    with pytest.raises(ValueError, match="neither a number of train iterations nor of samples: give .* in iterations"):
        schedule.weight(Progress.of_run(5, 20, None, None))
