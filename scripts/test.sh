#!/usr/bin/env bash
# The whole test matrix: every release of megatron-core that the newest usable Python can run, through nox and uv.
#
#   scripts/test.sh                            everything
#   scripts/test.sh 0.18.2                     one release
#   PYTHON=/path/to/python scripts/test.sh     with this Python
#   MEGATRON_LM=DIR[:DIR...] scripts/test.sh   also upstream's own pretrain_gpt.py and unit tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-$(scripts/find_python.sh)}
echo "Python: $python ($("$python" -c 'import platform; print(platform.python_version())'))"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    echo "Left out: megatron-core 0.17.1, 0.18.2 and 0.19.2 need Python >= 3.12, and none was found. Testing 0.16.1 only."
fi

tools=.nox/tools
if ! "$tools/bin/python" -c 'import nox, rich, uv' 2>/dev/null; then
    rm -rf "$tools"
    "$python" -m venv "$tools"
    "$tools/bin/pip" install --quiet nox rich uv
fi
export PATH="$PWD/$tools/bin:$PATH"
# uv reads its own variable for extra wheels
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
[ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS

rm -rf .nox/results
status=0
if [ $# -gt 0 ]; then
    nox --no-error-on-missing-interpreters -s "tests(release='$1')" || status=$?
else
    nox --no-stop-on-first-error || status=$?
fi
python ci/report.py .nox/results || status=1
exit "$status"
