#!/usr/bin/env bash
# The tests, through nox and uv, on the releases of megatron-core that the newest usable Python can run.
#
#   scripts/test.sh                            does it work here? The reference release, and conformance to the others
#   scripts/test.sh --others                   the rest that CI runs: what differs on others, frameworks, lint, docs, wheel
#   scripts/test.sh --all                      both, with every test on each release and the scheduled suites
#   scripts/test.sh 0.18.2                     one release, as CI runs it
#   scripts/test.sh --quick [0.18.2]           the inner loop: engine, conformance and overrides of one release
#   PYTHON=/path/to/python scripts/test.sh     with this Python
#   MEGATRON_LM=DIR[:DIR...] scripts/test.sh --others   also upstream's own unit tests
#
# Environments stay in .nox. They are brought up to date each time, but for --quick, which takes them as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-$(scripts/find_python.sh)}
echo "Python: $python ($("$python" -c 'import platform; print(platform.python_version())'))"
default_release=$("$python" -c 'import json; print(json.load(open("patches/megatron_mtp_patches/megatrons.json"))["default"])')
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    echo "Left out: every megatron-core after 0.16.1 needs Python >= 3.12, and none was found. Testing 0.16.1 only."
    default_release=0.16.1
fi

tools=.nox/tools
if ! "$tools/bin/python" -c 'import nox, uv' 2>/dev/null; then
    rm -rf "$tools"
    "$python" -m venv "$tools"
    "$tools/bin/pip" install --quiet nox uv
fi
export PATH="$PWD/$tools/bin:$PATH"
export UV_PYTHON_DOWNLOADS=never  # a Python that is not installed is left out
# uv reads its own variable for extra wheels
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
[ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS

[ "${1:-}" = --others ] || rm -rf .nox/results
# On CI, nox would fail for each Python that is not installed.
run_sessions() {
    nox -r --no-error-on-missing-interpreters --no-stop-on-first-error "$@"
}

# The releases other than the reference release; with 0.16.1 alone there are none.
run_releases() {
    [ "$default_release" = 0.16.1 ] || run_sessions -t releases -- "$1"
}

# Two commands side by side, because each waits for what it installs and imports. The output of the first follows.
run_both() {
    local status=0 output
    output=$(mktemp)
    $1 > "$output" 2>&1 &
    trap "kill $! 2> /dev/null || true" EXIT
    $2 || status=$?
    wait $! || status=$?
    trap - EXIT
    cat "$output"
    rm "$output"
    return $status
}

run_reference() {
    run_both "run_releases --conformance" "run_sessions -t reference"
}

run_others() {
    local status=0
    run_both "run_sessions -t others" "run_releases --rest" || status=$?
    run_sessions -t together || status=$?
    return $status
}

case "${1:-}" in
    --quick) nox -R --no-error-on-missing-interpreters -s "tests(release='${2:-$default_release}')" -- --quick ;;
    --all)
        export ALL_TESTS=1
        status=0
        run_reference || status=$?
        run_others || status=$?
        exit $status
        ;;
    --others) run_others ;;
    "") run_reference ;;
    *) run_sessions -s "tests(release='$1')" ;;
esac
