"""Megatron's own trainer from the wheel (our small loop on 0.16.1) under the patches, on CPU ranks."""

import importlib.util
import re

import pytest

needs_trainer = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="the 0.16.1 wheel has no megatron.training; tests/checkout covers its trainer",
)
LAYOUTS = pytest.mark.parametrize(
    "ranks, flags",
    [
        pytest.param(1, [], id="1 rank"),
        pytest.param(2, ["--use-distributed-optimizer", "--bf16"], id="DP2", marks=needs_trainer),
        pytest.param(2, ["--pipeline-model-parallel-size", "2"], id="PP2", marks=needs_trainer),
    ],
)


def numbers(lines):
    return {iteration: values[:3] for iteration, values in lines.items()}


def test_without_a_threshold_training_is_what_it_is_without_the_patches(train):
    plain = numbers(train(patches="-skip-update-on-large-grad-norm")[0])
    assert numbers(train()[0]) == plain
    assert len(plain) == 12
    assert float(plain[12][1]) < float(plain[1][1])


@LAYOUTS
def test_a_step_over_the_threshold_leaves_no_trace(train, ranks, flags):
    """A threshold just under the largest norm skips that step alone: the steps before it are
    the same, and the learning rate stays where it was for one step."""
    free, _ = train(*flags, ranks=ranks)
    norms = {iteration: float(values[2]) for iteration, values in free.items()}
    largest = max(norms, key=norms.get)
    second = max(norm for iteration, norm in norms.items() if iteration != largest)
    held, output = train(*flags, "--grad-norm-skip-threshold", str((norms[largest] + second) / 2), ranks=ranks)
    assert len(re.findall("update skipped: grad norm", output)) == 1
    assert [held[i][:3] for i in range(1, largest)] == [free[i][:3] for i in range(1, largest)]
    assert held[largest][2] == free[largest][2]
    assert len({values[0] for values in held.values()}) == len({values[0] for values in free.values()}) - 1


@needs_trainer
@LAYOUTS
def test_a_run_resumes_where_it_was(train, tmp_path, ranks, flags):
    flags = [*flags, "--grad-norm-skip-threshold", "1000", "--save", str(tmp_path / "checkpoint")]
    straight, output = train(*flags, ranks=ranks)
    assert "updates skipped for grad norm:   0 |" in output
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("6")
    resumed, _ = train(*flags, "--load", str(tmp_path / "checkpoint"), ranks=ranks)
    # the second line of a process shows the mean loss of two iterations, see tests/checkout
    assert sorted(resumed) == list(range(7, 13))
    assert {i: resumed[i][2] for i in resumed} == {i: straight[i][2] for i in resumed}
    assert {i: resumed[i] for i in resumed if i != 8} == {i: straight[i] for i in resumed if i != 8}
