#!/usr/bin/env bash
# From a fresh clone to three plots: install into .venv; have doctor and parity examine a training on two ranks, and train
# it without and with the patches; train MTP heads over one frozen model by two losses and decode with them; train over
# bad batches with and without --grad-norm-skip-threshold. Under four minutes on two CPU cores. A GPU is used for the
# heads and the batches alone.
#
# Needs Python >= 3.12, as megatron-core does from 0.17.1 on; PYTHON=/path/to/python overrides the choice of Python.
# Everything lands in .venv and demo_output; remove them to start again.
set -euo pipefail
cd "$(dirname "$0")/.."

started=$SECONDS
stage() { printf '\n=== [%d s] %s\n' "$((SECONDS - started))" "$*"; }

stage "Python"
python=.venv/bin/python
if "$python" -c '' 2> /dev/null; then
    echo "reusing .venv ($("$python" --version))"
else
    base=${PYTHON:-$(scripts/find_python.sh)}
    "$base" -m venv --clear .venv
    echo "made .venv with $("$python" --version)"
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    echo "The demo needs Python >= 3.12: on an older one only megatron-core 0.16.1 runs, whose wheel has no trainer."
    echo "Remove .venv, and say PYTHON=/path/to/python scripts/demo.sh."
    exit 1
fi

stage "install: torch, megatron-core, this project"
# uv does not read pip's variables.
if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS// /,}}"; fi
if uv --version > /dev/null 2>&1; then
    uv=uv
else
    uv=.venv/bin/uv
    "$uv" --version > /dev/null 2>&1 || "$python" -m pip install --quiet uv || echo "uv cannot be had; pip installs"
fi
install() {
    if ! { "$uv" --version > /dev/null 2>&1 && "$uv" pip install --python "$python" "$@"; }; then
        echo "installing with pip"
        "$python" -m pip install --quiet "$@"
    fi
}
# torch 2.11 is the first whose gloo can average, which a run without a GPU needs.
install -e ".[demo,te]" "torch>=2.11" "megatron-core==0.18.2"
# In a folder of its own: without its kernels, Megatron outside a rehearsal cannot be imported beside it.
install --no-deps --target .venv/transformer_engine "transformer-engine==2.16.1"

stage "is this run computing the right numbers?"
PYTHONPATH=.:.venv/transformer_engine "$python" -W ignore -m scripts.demo.two_ranks --output demo_output

stage "import torch and Megatron, once for all trainings"
"$python" -W ignore -m scripts.demo --output demo_output
stage "done"
