#!/bin/sh
# Prints the path of the newest usable Python of the versions 3.OLDEST to 3.NEWEST, or says what it found and exits 1.
#
#   find_python.sh [OLDEST NEWEST]      default 12 14, what sprl and its pinned packages run on
#
# It looks at python3.14, python3.13, ..., python3, python in every folder of PATH (not only at the first of a name: a version
# manager's shim may stand before a working one and fail), and among pyenv's versions. Usable: it can make a virtual
# environment and install into it. PYTHON=/path/to/python tries that one alone.
set -eu
oldest=${1:-12}
newest=${2:-14}

# One candidate a line.
candidates() {
  if [ -n "${PYTHON:-}" ]; then
    printf '%s\n' "$PYTHON"
    return
  fi
  names=
  minor=$newest
  while [ "$minor" -ge "$oldest" ]; do
    names="$names python3.$minor"
    minor=$((minor - 1))
  done
  IFS=:
  set -f
  # shellcheck disable=SC2086 # PATH is to be split
  set -- $PATH
  set +f
  unset IFS
  for folder in "$@"; do
    for name in $names python3 python; do
      printf '%s\n' "$folder/$name"
    done
    case $folder in # pyenv's shims answer only for the version in use; the versions are beside them
      */shims) printf '%s\n' "${folder%/shims}"/versions/*/bin/python ;;
    esac
  done
  for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    printf '%s\n' "$root"/versions/*/bin/python
  done
}

# Prints `MINOR MICRO LACKS PATH` for a Python 3 (LACKS: what keeps it from being used, or -), and nothing for anything else.
# The program is understood by every Python, however old; PYTHONPATH and the user's packages are not looked at.
probe='
import sys
lacks = "-"
for name in ("venv", "ensurepip", "ssl", "ctypes"):
  try:
    __import__(name)
  except ImportError:
    lacks = name
    break
if hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled():
  lacks = "GIL"
if sys.version_info[3] != "final":
  lacks = "release"
if sys.version_info[0] == 3:
  path = getattr(sys, "_base_executable", None) or sys.executable or sys.argv[1]  # of a virtual environment: the one it was made with
  print("%d %d %s %s" % (sys.version_info[1], sys.version_info[2], lacks, path))
'

found=$(
  candidates | while IFS= read -r candidate; do
    resolved=$(command -v "$candidate" 2>/dev/null) || continue
    "$resolved" -E -s -c "$probe" "$resolved" </dev/null 2>/dev/null || true
  done | sort -k1,1nr -k2,2nr -s | awk '!seen[$0]++'
)

best=
while read -r minor _ lacks path; do
  if [ -z "$best" ] && [ -n "$minor" ] && [ "$lacks" = - ] && [ "$minor" -ge "$oldest" ] && [ "$minor" -le "$newest" ]; then
    best=$path
  fi
done <<END
$found
END

if [ -n "$best" ]; then
  printf '%s\n' "$best"
  exit 0
fi

# Why a Python found is not used, in a few words.
reason() { # MINOR LACKS
  if [ "$1" -lt "$oldest" ]; then
    echo 'too old'
  elif [ "$1" -gt "$newest" ]; then
    echo 'too new: some of the packages are not built for it yet'
  else
    case $2 in
      GIL) echo 'a free-threaded build, which some of the packages are not built for' ;;
      release) echo 'not a final release' ;;
      venv | ensurepip) echo "its module $2 is missing; on Debian and Ubuntu: apt install python3.$1-venv" ;;
      *) echo "its module $2 is missing" ;;
    esac
  fi
}

wanted="Python 3.$oldest"
[ "$newest" -gt "$oldest" ] && wanted="$wanted to 3.$newest"
{
  if [ -n "${PYTHON:-}" ]; then
    echo "PYTHON=$PYTHON is not a usable $wanted."
  else
    echo "No usable $wanted on PATH or among pyenv's versions."
  fi
  if [ -n "$found" ]; then
    echo 'Found:'
    while read -r minor micro lacks path; do
      echo "  3.$minor.$micro  $path: $(reason "$minor" "$lacks")"
    done <<END
$found
END
  else
    echo 'Found: no Python 3 at all.'
  fi
  example=$((newest > 13 ? 13 : newest))
  echo 'Get one in any of these ways, then run the same command again:'
  echo "  Debian, Ubuntu   apt install python3.$example python3.$example-venv"
  echo "  Fedora           dnf install python3.$example"
  echo "  macOS            brew install python@3.$example"
  echo "  anywhere         pyenv install 3.$example"
  echo "or name one that lies elsewhere: make PYTHON=/path/to/python3.$example ..."
} >&2
exit 1
