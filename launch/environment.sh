#!/bin/sh
# Makes a virtual environment with uv, or updates it. Takes a fraction of a second when nothing has changed.
#
#   environment.sh FOLDER [OPTIONS OF uv sync]     sprl in place, with the package versions of uv.lock
#   environment.sh FOLDER --requirements FILE      the packages of FILE alone, on Python 3.11
#
# It uses the uv on PATH. If there is none, python3 (3.8 or later) installs uv into .uv/ of the checkout.
# UV_PYTHON chooses the Python: a version or a path. If the machine has no suitable Python, uv downloads one.
set -eu
folder=$1
shift
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV

fail() {
  echo "sprl: $1. docs/install.md lists the requirements." >&2
  exit 1
}

# pyenv's shims offer one version only. Its other versions go first on PATH, the newest before the others.
pyenv=$(command -v pyenv || true)
for bin in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[1-9]*/bin "${pyenv%/bin/pyenv}"/versions/3.1[1-9]*/bin; do
  [ ! -x "$bin/python3" ] || PATH=$bin:$PATH
done

if ! uv=$(command -v uv); then
  uv=.uv/bin/uv
  if ! "$uv" --version >/dev/null 2>&1; then
    echo 'sprl: installing uv into .uv' >&2
    { python3 -m venv --clear .uv && .uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9; } >&2 ||
      fail 'uv is not on PATH, and python3 could not install it'
  fi
fi

say() { echo "sprl: installing packages into $folder (a minute or two the first time)" >&2; }

if [ "${1:-}" = --requirements ]; then
  cmp -s "$2" "$folder/requirements.txt" && exit
  say
  "$uv" venv --quiet --clear --seed --python 3.11 "$folder" || fail "uv could not make $folder with Python 3.11"
  # pip reads the machine's settings, which may name a CPU build of PyTorch. uv does not read them.
  "$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-compile -r "$2" || fail "pip could not install $2"
  cp "$2" "$folder/requirements.txt"
  exit
fi

if [ -n "${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-}}" ]; then
  # uv.lock names files on PyPI. From another index, uv installs the same versions and checks the same hashes.
  say
  if ! { "$uv" venv --quiet --allow-existing "$folder" &&
    "$uv" export --quiet --frozen --output-file "$folder/requirements.txt" "$@" >/dev/null &&
    "$uv" pip install --quiet --python "$folder" --requirements "$folder/requirements.txt"; }; then
    fail "uv could not install into $folder"
  fi
else
  export UV_PROJECT_ENVIRONMENT="$folder"
  set -- sync --locked --inexact --quiet "$@" # --inexact keeps packages that other make targets have installed
  "$uv" "$@" --check 2>/dev/null && exit
  say
  "$uv" "$@" || fail "uv could not install into $folder"
fi
