"""The second part of scripts/demo.sh, in short trainings; plots, logs and flags are left in a folder.

    python -m scripts.demo [--output demo_output]

One small GPT is trained on the standard library's sources. MTP heads are trained over it, frozen, by cross entropy and
by e2e_tv, and a speculative decoder counts what it accepts. Then the GPT's own training goes on over bad batches, with
and without --grad-norm-skip-threshold. Needs what scripts/demo.sh installs.
"""

from __future__ import annotations

from . import experiments, plots, runs, stages

NEXT = """\
Which known defects does your own run meet? Ask doctor:
    .venv/bin/megatron-mtp-patches doctor --batch YOUR_LAUNCH_SCRIPT
See one of them, without and with the patches:
    .venv/bin/megatron-mtp-patches reproduce ML-5047
Check in one step that the heads leave the main model as it is, to the bit:
    PYTHONPATH=. .venv/bin/megatron-mtp-patches verify-mtp {device}\\
        scripts/demo/train.py $(cat {output}/e2e_tv.flags)
See what each patch does in this environment:
    .venv/bin/megatron-mtp-patches status
Compare all losses, with three seeds, 35 minutes on a CPU:
    .venv/bin/python -m scripts.acceptance losses --out {output}
Add heads to your model, by --mtp-init last-layer:
    docs/add-mtp-heads.md
Read about the losses, and about skipped updates:
    docs/mtp.md#train-mtp-heads-for-acceptance
    docs/norms.md#skip-update-on-large-grad-norm"""


def main() -> None:
    output, stage = stages.start("scripts.demo", __doc__)
    device = runs.warm()
    from . import dataset

    data = output / "data" / "stdlib"
    documents, size = dataset.write(data, dataset.library_sources())
    print(f"data: the Python standard library, {documents} sources, {size / 1e6:.0f} million bytes")
    print("device: " + ("cuda" if device == "cuda" else "the CPU (no GPU here: rehearsal)"))
    print("left out: TransformerEngine and Apex; Megatron's own modules do the work")
    accident = experiments.ACCIDENT

    stage(f"a main model without heads: {accident.fork} of {accident.last} iterations")
    main_model = experiments.train_to_fork(data, output, accident)

    stage("MTP heads by two losses, at the same time, with --freeze-base-model-for-mtp")
    heads = experiments.losses(data, output, experiments.HEADS_FLAGS)
    print(flush=True)
    experiments.compare_losses(heads).show()
    print(experiments.judge_losses(heads))
    print(f"plot: {output / plots.LOSSES}")

    stage(f"{len(accident.corrupt)} bad batches, without and with --grad-norm-skip-threshold")
    table = experiments.skipping(data, output, accident, main_model)
    print(flush=True)
    table.show()
    print(f"plot: {output / plots.SKIPPING}")

    stage("what to try next")
    print(NEXT.format(output=output, device="--device cpu " if device == "cpu" else ""))


if __name__ == "__main__":
    main()
