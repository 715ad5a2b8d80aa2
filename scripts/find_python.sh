#!/usr/bin/env bash
# Print the path of a usable Python; say on stderr which, and why that one.
#
# 3.12 if there is one (every release of megatron-core supports it), else the newest later one, else 3.11 or 3.10
# (megatron-core 0.16.1 only).
set -euo pipefail

wanted="3.12 3.14 3.13 3.11 3.10"

# A candidate counts only if it runs (a pyenv shim may be on PATH for a version that is not selected), is the version
# that its name says, and can make a virtual environment.
usable() {
    "$1" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" > /dev/null 2>&1
}

accept() {
    echo "Python $1: $2 ($3)" >&2
    echo "$2"
    exit 0
}

for version in $wanted; do
    while IFS= read -r candidate; do
        if usable "$candidate" "$version"; then accept "$version" "$candidate" "on PATH"; fi
    done < <(type -aP "python$version" python3 python || true)
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python; do
        if usable "$candidate" "$version"; then accept "$version" "$candidate" "installed by pyenv"; fi
    done
    if uv --version > /dev/null 2>&1 && candidate=$(uv python find --system --no-python-downloads "$version" 2> /dev/null); then
        if usable "$candidate" "$version"; then accept "$version" "$candidate" "installed by uv"; fi
    fi
done

{
    echo "No usable Python found: looked for ${wanted// /, } on PATH, among pyenv's versions and uv's."
    echo "Install one (e.g. 'uv python install 3.12' or 'pyenv install 3.12'; on Debian python3-venv belongs to it)."
} >&2
exit 1
