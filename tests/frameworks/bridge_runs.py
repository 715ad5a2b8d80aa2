"""Run bridge_pretrain.py in forks, and read what Megatron-Bridge logs."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.end_to_end.conftest import run_command
from tests.pages import ROOT
from tests.warm.processes import LIMIT, run_ranks

HERE = Path(__file__).parent
# As each token goes to each expert, the auxiliary loss of a layer is 1.
EXPERTS = (
    "model.num_moe_experts=2",
    "model.moe_router_topk=2",
    "model.moe_router_load_balancing_type=aux_loss",
    "model.moe_aux_loss_coeff=0.01",
    "model.add_bias_linear=False",
)
LOG_LINE = re.compile(
    r" iteration +(\d+)/.* number of skipped iterations: +(\d) \|.* number of nan iterations: +0 \|(.*)"
)


def words(folder, iterations, settings):
    return ["run", "--device", "cpu", str(HERE / "bridge_pretrain.py"), str(folder), str(iterations), *settings]


def pretrain(folder, iterations, *settings, ranks=1):
    """Run bridge_pretrain.py. Return {iteration: (was its update skipped, {metric: text})} and all output."""
    ended = run_ranks(ranks, partial(run_command, "all", *words(folder, iterations, settings)))
    output = "".join(rank.output for rank in ended)
    assert {rank.code for rank in ended} == {0}, output[-6000:]
    logged = {}
    for iteration, skipped, rest in LOG_LINE.findall(output):
        metrics = dict(part.strip().rsplit(": ", 1) for part in rest.split("|") if part.strip())
        logged[int(iteration)] = (bool(int(skipped)), metrics)
    return logged, output


def run_interpreter(patches, *words):
    """Run `megatron-mtp-patches WORDS` in a new interpreter. Return its exit code and its output."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'patches'}:{ROOT}", "MEGATRON_MTP_PATCHES": patches}
    command = [sys.executable, "-m", "megatron_mtp_patches", *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    return ended.returncode, ended.stdout + ended.stderr


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def read_scalars(folder, step):
    """{tag: value} of this step."""
    events = read_events(folder)
    tags = events.Tags()["scalars"]
    return {tag: scalar.value for tag in tags for scalar in events.Scalars(tag) if scalar.step == step}


def rank_lines(output):
    """{title: [what the first rank printed, what the second]}"""
    lines = {}
    for rank, title, text in re.findall(r"^rank (\d), ([^:]*): (.*)", output, re.M):
        lines.setdefault(title, {})[int(rank)] = text
    return {title: [texts[0], texts[1]] for title, texts in lines.items()}
