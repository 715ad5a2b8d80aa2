"""What the experiments of scripts/demo show in full: tables as Markdown, pictures, a line of the log."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.demo import experiments, runs

COLUMNS = ("iteration", "lm loss", "mtp_1 loss", "grad norm", "mtp grad norm", "mtp_1 acceptance %:")


def blocks(work: Path, pictures: Path) -> dict[str, str]:
    """Train all that the README and docs/ show, in minutes; logs are left in `work`, the plots in `pictures`."""
    work.mkdir(parents=True, exist_ok=True)
    data = work / "data" / "stdlib"
    runs.warm()
    from scripts.demo import dataset

    dataset.write(data, dataset.library_sources())
    shared = experiments.train_to_fork(data, work, experiments.ACCIDENT)
    skipping = experiments.skipping(data, work, experiments.ACCIDENT, shared)
    tables = {"heads": experiments.heads(data, work), "skipping": skipping}
    for picture in work.glob("*.png"):
        shutil.copy(picture, pictures)
    line = f"```text\n{log_line(work / 'detached.log')}\n```"
    return {name: "\n".join(table.lines()) for name, table in tables.items()} | {"log-line": line}


def log_line(log: Path) -> str:
    """Megatron's last, without the columns that are not ours to show."""
    line = [line for line in log.read_text(encoding="utf-8").splitlines() if "] iteration " in line][-1]
    line = line.partition("] ")[2]
    shown: list[str] = []
    for column in line.strip(" |").split("|"):
        if column.strip().startswith(COLUMNS):
            shown.append(" ".join(column.split()))
        elif shown[-1] != "...":
            shown.append("...")
    return " | ".join(shown)
