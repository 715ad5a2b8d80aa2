#!/usr/bin/env bash
# What only a GPU can show, in one command: tests, upstream's tests, training, time and memory. docs/gpu.md says more.
#
#   ci/gpu/run.sh --wheels DIR --megatron DIR                          on a GPU; PyTorch is the machine's, no registry is asked
#   ci/gpu/run.sh --device cpu                                         a rehearsal at small size, with the Python that runs it
#   PYTHON=/path/to/python ci/gpu/run.sh --only 'training*' ...        with this Python
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/lane.py" "$@"
