"""`parity`: does a run compute the same numbers on every parallel layout?

The run is made small (small.py, left_out.py) and trained for two steps on one rank, which is the reference, and on each
cut of its layout (cuts.py): forks of one process (processes.py, training.py, trainings.py) in which the weights depend
on their names alone (weights.py) and the samples on their index (samples.py). What the ranks of a cut have recorded
(gradients.py, hidden_states.py) is put together and compared with the reference (comparison.py, verdict.py). A
deviation that no declared dependence (legitimate.py) explains is a finding. study.py looks for the known defects that
explain it (explanations.py), or changes the run (controls.py); report.py writes a program that shows it again.

resume.py compares resumes of such a run with the run that went on, upgrade/ the runs of two Megatrons. trainer.py has
Megatron's trainer read flags in this process, as `doctor` needs it, too.
"""
