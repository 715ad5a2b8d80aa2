"""What the demo's runs show: their tables as Markdown, their pictures, a line of their log."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from markdown_pages import from_rich, table

SCRIPTS = Path(__file__).resolve().parents[1]
FSDP = "fsdp-without-master-weights"
HELD = {  # by the names of scripts/bench/held.py
    "parameters": "model weights (bf16)",
    "gradients": "gradients (fp32)",
    "main_weights": "Megatron-FSDP's main weights (fp32)",
    "optimizer_state": "FusedAdam's state",
}
COLUMNS = ("iteration", "lm loss", "mtp_1 loss", "grad norm", "mtp grad norm", "mtp_1 acceptance %:")


def blocks(work: Path, pictures: Path) -> dict[str, str]:
    """Train all that the README and docs/ show, in minutes; logs are left in `work`, the plots in `pictures`."""
    sys.path[:0] = [str(SCRIPTS / "demo"), str(SCRIPTS)]
    import heads
    import muon_stall
    import skipping

    work.mkdir(parents=True, exist_ok=True)
    data = work / "data" / "stdlib"
    _python("demo/build_dataset.py", data)
    found = {
        "heads": "\n".join(from_rich(heads.measure(data, work))),
        "skipping": "\n".join(from_rich(skipping.measure(data, work))),
        "log-line": f"```text\n{log_line(work / 'detached.log')}\n```",
    }
    _python("-m", "megatron_mtp_patches", "run", "--device", "cpu", "demo/small_figures.py", data, work)
    losses = muon_stall.measure()
    muon_stall.draw(losses, muon_stall.STEPS, work / muon_stall.PICTURE)
    found["muon-stall"] = "\n".join(from_rich(muon_stall.compare(losses)))
    for picture in work.glob("*.png"):
        shutil.copy(picture, pictures)
    return found


def memory(python: str) -> str:
    """Bytes of rank 0 of two on a CPU, by scripts/bench_memory.py, with the Megatron of `python`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "memory.json")
        command = [python, "bench_memory.py", FSDP, "--cpu", "--json", file]
        if subprocess.run(command, cwd=SCRIPTS).returncode:
            sys.exit(f"{python} cannot count the bytes, see above")
        sides = json.loads(file.read_text())[FSDP]
    without, patched = sides["without"][0], sides["with"][0]
    if without["held"] == patched["held"]:
        sys.exit(f"the Megatron of {python} holds the same with and without the patch; give one with 0.16.1 or 0.17.1")
    rows = []
    for what, name in HELD.items():
        before, after, saved = without["held"][what], patched["held"][what], patched["saves"].get(what)
        theory = "" if saved is None else f"{before:,} - {saved:,} = {before - saved:,}"
        rows.append([name, f"{before:,}", f"{after:,}", theory])
    rows.append(["the three steps", without["note"], patched["note"], ""])
    return "\n".join(table(["bytes of rank 0", "without", "with", "theory"], rows, right=(1, 2)))


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


def _python(*arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], cwd=SCRIPTS, check=True)
