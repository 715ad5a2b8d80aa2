"""Train upstream's pretrain_gpt.py in each parallel layout with TransformerEngine's layers, on CPU ranks.

    python -m scripts.layouts --megatron PATH_OR_URL [--release 0.19.0] [--layout NAME] [--out ci/layouts]

Each layout trains, saves, resumes, is checked by verify-mtp, and is compared with a training that must have the same
losses: with Megatron's own layers, or for context parallelism on one rank. The table of --out gets a section for each
Megatron. Ends with 1 where a layout fails or its losses differ by more than the table's tolerance, with 2 if the
arguments cannot be used.

Needs torch, the TransformerEngine of the release and what megatron.training imports in the Python that runs it. The
packed layouts train on conversations (--sft), which needs datasets and transformers < 5.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from megatron_mtp_patches.rehearsal import transformer_engine
from rich.console import Console

from scripts import study
from scripts.common.arguments import make_parser, one_of
from scripts.common.process import ROOT
from scripts.replay.source import Repository, SourceError

from . import table
from .cases import LAYOUTS
from .training import rehearse


def main() -> int:
    names = [layout.name for layout in LAYOUTS]
    parser = make_parser("scripts.layouts", __doc__)
    parser.add_argument("--megatron", required=True, metavar="PATH_OR_URL", help="Megatron-LM")
    parser.add_argument("--release", help="a release, tag, branch or commit; not for a tree without history")
    text = "only this one; may be repeated"
    parser.add_argument("--layout", action="append", type=one_of(names), metavar="NAME", help=text)
    parser.add_argument("--work", type=Path, default=ROOT / ".replay", help="where trees are unpacked")
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "layouts", help="folder of the table")
    options = parser.parse_args()
    if not transformer_engine.available():
        parser.error(
            f"{sys.executable} has no TransformerEngine to rehearse with: {transformer_engine.installation_advice()}."
        )
    try:
        repository = Repository(options.megatron, options.work.resolve())
        if repository.git and not options.release:
            parser.error("--release: say which, as 0.19.0 or main.")
        release = options.release or repository.version()
        repository.check(release)
        tree = repository.unpack(release)
    except SourceError as error:
        parser.error(str(error))
    if not (tree.folder / "pretrain_gpt.py").is_file():
        parser.error(f"--megatron {options.megatron}: {tree.folder} holds no pretrain_gpt.py; give Megatron-LM itself.")
    about = {"Megatron-LM": tree.commit[:12] or tree.release, **study.versions("torch", "transformer-engine")}
    console = Console()
    results = {}
    for layout in LAYOUTS:
        if layout.name not in (options.layout or names):
            continue
        with tempfile.TemporaryDirectory() as folder, console.status(f"{release}: {layout.name}"):
            result = results[layout.name] = rehearse(tree.folder, layout, Path(folder))
        table.add(options.out, release, about, results)
        outcome = f"loss {result['losses'][-1]:.6f}" if result["losses"] else result["left_out"]
        good = "" if table.is_good(result) else "  NOT GOOD"
        console.print(f"{release}: {layout.name}: {outcome}{good} {result['error']}", markup=False)
    return int(not all(map(table.is_good, results.values())))


if __name__ == "__main__":
    sys.exit(main())
