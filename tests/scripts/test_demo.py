"""What the demo prints: its progress, its tables, and what it says of the losses."""

import math
import os
import re
import signal
import time

import pytest
from megatron_mtp_patches.megatrons.known import DEFAULT, TRANSFORMER_ENGINE

from scripts.common.forks import fork, wait
from scripts.common.process import ROOT
from scripts.demo import experiments, runs, two_ranks

ITERATION = (
    " [2026-01-01 00:00:00.000000] iteration      120/     240 | consumed samples:          960 | elapsed time per "
    "iteration (ms): 100.0 | learning rate: 2.000000E-03 | lm loss: 2.081234E+00 | mtp_1 loss: 2.160000E+00 | loss "
    "scale: 1.0 | grad norm: 0.304 | number of skipped iterations:   0 | mtp_1 acceptance %: 39.026 |"
)
VALIDATION = (
    "validation of the MTP heads at iteration 120 | mtp_1 loss value: 2.770515E+00 | mtp acceptance length value: "
    "2.875577E+00 | mtp greedy acceptance length value: 2.273625E+00 |"
)


def curves(sampled=3.0):
    steps = {iteration: 3.0 for iteration in range(241, 321)}
    return runs.Curves(steps, {}, steps, {240: 3.1}, 3.0, 0, {"sampled": sampled, "greedy": 3.5})


def test_progress_is_what_changes():
    assert runs.shorten(ITERATION) == " 120/240  lm loss 2.08  mtp_1 loss 2.16  grad norm 0.30"
    assert runs.shorten(VALIDATION) == "    on held-out text  accepted length 2.88  greedy 2.27"
    assert runs.shorten("saving checkpoint at iteration      60 to a folder") is None


def test_tables_fit_a_terminal(capsys):
    pair = [curves()] * 2
    experiments.compare_losses(pair).show()
    experiments.compare_skipping(experiments.ACCIDENT, *pair).show()
    two_ranks.compare(*pair, curves()).show()
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_it_installs_the_default_release_and_its_transformer_engine():
    script = (ROOT / "scripts" / "demo.sh").read_text(encoding="utf-8")
    installed = [("megatron-core", DEFAULT), ("transformer-engine", TRANSFORMER_ENGINE[DEFAULT])]
    assert re.findall(r'"([\w-]+)==([\d.]+)"', script) == installed


@pytest.mark.parametrize(
    "after, said",
    [
        (3.3, "e2e_tv: 0.30 more tokens in each verification step, 10 %."),
        (3.0, "In this run e2e_tv was not better than cross_entropy: 3.00 against 3.00 tokens."),
        (2.9, "In this run e2e_tv was not better than cross_entropy: 2.90 against 3.00 tokens."),
    ],
)
def test_it_says_which_loss_was_better(after, said):
    assert experiments.judge_losses([curves(3.0), curves(after)]) == said


def test_when_a_fork_fails_the_other_is_killed(tmp_path):
    pids = [fork(lambda: time.sleep(60), tmp_path / "sleeps"), fork(lambda: 1 / 0, tmp_path / "fails")]
    assert list(wait(pids, math.inf).values()) in ([None, 1], [1, None])
    assert "ZeroDivisionError" in (tmp_path / "fails").read_text()


def test_forks_do_not_outlive_an_interrupt(tmp_path, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    pid = fork(lambda: signal.pause(), tmp_path / "waits")
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        wait([pid], math.inf)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
