"""The words of a launch script are those that bash would give the training."""

import os
import shutil
import subprocess

import pytest
from megatron_mtp_patches.doctor.launch_script import read_commands
from megatron_mtp_patches.engine import UsageError

pytestmark = pytest.mark.forked("python")

SCRIPTS = {
    "a string over lines": "ARGS=\"\n  --a 1 \\\n  --b 'x y'\n\"\ntrain.py $ARGS\n",
    "an array": 'ARGS=(\n  --a 1  # one\n  # --off\n  --b "x y"\n)\ntrain.py ${ARGS[@]} \'$ * "\'\n',
    "a quoted array": 'A=(--a "x y")\nB=("${A[@]}" --b)\ntrain.py "${B[@]}"\n',
    "additions": 'A=(--a)\nA+=(--b 2)\nS="--c"\nS+=" --d"\ntrain.py ${A[@]} $S\n',
    "defaults": 'TP=${TP:-2}\nexport PP=${1:-"4"}\ntrain.py --tp $TP --pp $PP --dir "${DIR:-/x}/y"\n',
    "arithmetic": 'GPUS=8\ntrain.py --a $((GPUS*$GPUS - 1)) --b "$(( (7 - 12) / 2 ))" --c $((-7 % 4)) --d ${GPUS:?}\n',
    "what is empty": 'NONE=""\ntrain.py --a $NONE "$NONE" --b\n',
    "variables before a command": "RANKS=2\nOMP_NUM_THREADS=1 train.py --a $RANKS\n",
    "redirections and pipes": "train.py --a 1 > log 2>&1 < /dev/null\nfalse | cat; exit\n",
    "a condition": 'if [ -n "" ]; then\n  A="--a"\nelse\n  A="--b"\nfi\ntrain.py $A --c\n',
    "a command in a string": 'A=(--a 1)\nRUN="train.py ${A[*]} --b 2"\nbash -c "$RUN"\n',
}


@pytest.mark.skipif(not shutil.which("bash"), reason="it compares with bash")
@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_it_reads_what_bash_runs(tmp_path, text):
    program = tmp_path / "train.py"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    subprocess.run(["bash", "-c", text], env={"PATH": path}, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
    (command,) = read_commands(text, {"PATH": path})
    assert command.script == "train.py" and command.parameters_left() == []
    assert command.flags == (tmp_path / "words").read_text().split("\n")[:-1]


def test_what_only_bash_could_tell_is_left_as_it_is():
    text = "ID=$(date +%s)\ntorchrun --nnodes 2 train.py --a $UNSET --b ${UNSET%/*} --c $((2 ** 4)) --d $ID --e $1"
    text += " --f $((UNSET + 1)) --g $((8 / 0))\n"
    (command,) = read_commands(text, {})
    assert command.launcher == ["torchrun", "--nnodes", "2"]
    assert command.parameters_left() == [
        "$UNSET",
        "${UNSET%/*}",
        "$((2 ** 4))",
        "$(date +%s)",
        "$1",
        "$((UNSET + 1))",
        "$((8 / 0))",
    ]


def test_each_command_with_flags_of_its_own_is_a_run():
    text = "mkdir -p x\npython a.py\npython b.py --x 1\nif y; then c.py --z; else run.sh c.py --z; fi"
    assert [(one.script, one.flags) for one in read_commands(text, {})] == [("b.py", ["--x", "1"]), ("c.py", ["--z"])]


def test_what_is_set_under_a_condition_is_named():
    text = 'A="--a"\nif [ $X = 1 ]; then A="$A --b"; fi\nfor i in 1 2; do B=$i; done\nC=1\ntrain.py $A\n'
    (command,) = read_commands(text, {})
    assert (command.flags, command.conditional) == (["--a", "--b"], ["A", "B"])


def test_a_text_without_a_script_is_flags():
    (command,) = read_commands("--a 1 \\\n--b '2 3'\n--c $HOME # no more", {"HOME": "/root"})
    assert command.flags == ["--a", "1", "--b", "2 3", "--c", "/root"]


def test_in_flags_that_were_copied_a_bar_is_part_of_a_word():
    (command,) = read_commands("--layout Ett|tt|mL \\\n --b '2 3' # no more", {})
    assert command.flags == ["--layout", "Ett|tt|mL", "--b", "2 3"]
    with pytest.raises(UsageError, match="No closing quotation"):
        read_commands("--a 'x", {})


@pytest.mark.parametrize(
    "head, launcher, ranks",
    [
        ("", "srun --ntasks=8 -u python", 8),
        ("", "srun -n8 python", 8),
        ("", "srun -N2 --ntasks-per-node 4 numactl -N 1 python", 8),
        ("#SBATCH --nodes=2  # of 4\n\n#SBATCH --ntasks-per-node=4\n", "srun -l python", 8),
        ("#SBATCH -N 4\n#SBATCH --ntasks-per-node=4\n", "srun -N 2 bash -c 'cd x; python", 8),
        ("", "srun -N2 -n2 torchrun --nproc-per-node 2 --nnodes 2", 4),
        ("#SBATCH --ntasks=8\n", "srun torchrun", None),
        ("#SBATCH --ntasks=8\n", "python", None),
        ("#SBATCH --ntasks=8\n", "srun hostname; python", None),
        ("##SBATCH --ntasks=8\n", "srun python", None),
        ("cd x\n#SBATCH --ntasks=8\n", "srun python", None),
        ("#SBATCH --nodes=2\n", "srun --ntasks-per-node=$EACH python", None),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n", "srun --ntasks=4 python", None),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n", "srun --ntasks=$N python", None),
    ],
)
def test_numbers_of_srun_say_how_many_ranks_there_are(head, launcher, ranks):
    end = "'" * launcher.count("'")
    (command,) = read_commands(f"#!/bin/bash\n{head}{launcher} train.py --a 1 --b{end}\n", {})
    assert command.world_size() == ranks
