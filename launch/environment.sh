#!/bin/sh
# Makes a virtual environment and installs into it what a pyproject.toml extra or a requirements file asks for.
#
#   environment.sh FOLDER PINS EXTRAS [OLDEST NEWEST]
#
# FOLDER  where: made when absent or broken, kept otherwise
# PINS    the file of pinned versions
# EXTRAS  sprl itself is installed, in place, with these extras; '' installs everything in PINS, and not sprl
# OLDEST NEWEST  the minor versions of Python 3 that will do, as find_python.sh takes them
#
# JAX=0.11.2 in the environment puts that version of jax, jaxlib and their plugins in the place of the pinned ones.
# The second time it is instant: a stamp in FOLDER holds a checksum of all that the result depends on.
set -eu
folder=$1
pins=$2
extras=$3
shift 3
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
here=$(dirname "$0")
python=$folder/bin/python
stamp=$folder/.made-$(printf '%s' "${extras:-pins}" | tr , -)

want=$({ pwd; echo "$extras ${JAX:-}"; cat "$pins" pyproject.toml "$0"; } | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && "$python" -c '' 2>/dev/null; then
  exit 0
fi

if ! "$python" -m pip --version >/dev/null 2>&1; then
  base=$(sh "$here/find_python.sh" "$@")
  echo "sprl: making $folder with $("$base" --version) ($base)" >&2
  "$base" -I -m venv --clear "$folder"
fi

if [ -n "${JAX:-}" ]; then
  sed -e "s/^jax==.*/jax==$JAX/" -e "s/^jaxlib==.*/jaxlib==$JAX/" \
    -e "s/^\(jax-cuda13-[a-z]*\)==.*/\1==$JAX/" -e '/^libtpu==/d' "$pins" >"$folder/pins.txt"
  pins=$folder/pins.txt
fi
if [ -n "$extras" ]; then
  set -- -c "$pins" -e ".[$extras]"
else
  set -- -r "$pins"
fi
echo "sprl: installing packages into $folder (a minute or two the first time)" >&2
# No compiling beforehand: most of what is installed is never imported, and the first import compiles what is.
if ! "$python" -m pip install --quiet --quiet --disable-pip-version-check --no-compile "$@"; then
  echo "sprl: pip could not install into $folder; the reason is above." >&2
  if ! command -v cc >/dev/null && ! command -v gcc >/dev/null; then
    echo 'There is no C compiler here, and a package (pycosat, which reasoning-gym asks for) is compiled on installation:' >&2
    echo '  Debian, Ubuntu   apt install build-essential python3-dev' >&2
    echo '  macOS            xcode-select --install' >&2
  fi
  exit 1
fi
printf '%s\n' "$want" >"$stamp"
