#!/bin/sh
# Runs a command under a scheduler that takes exit status 0 for "done", and starts again what fails.
#
#   preemptible.sh COMMAND...
#
# A run that a SIGTERM ends has saved and says 0. Here that becomes 75 (EX_TEMPFAIL): saved, not done, start it again. Any other
# status is the command's own.
set -eu
asked=
child=
trap 'asked=yes; [ -z "$child" ] || kill -TERM "$child"' TERM
"$@" &
child=$!
if [ -n "$asked" ]; then
  kill -TERM "$child"
fi

# A signal wakes `wait` early; then the command is still there, and is waited for again.
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do
  status=0
  wait "$child" || status=$?
done
if [ -n "$asked" ] && [ "$status" -eq 0 ]; then
  exit 75
fi
exit "$status"
