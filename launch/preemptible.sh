#!/bin/sh
# Runs a command under a scheduler that reads exit status 0 as "finished" and restarts a failed command.
#
#   preemptible.sh COMMAND...
#
# COMMAND is a run of sprl: on SIGTERM it saves a checkpoint and exits with status 0. This script passes SIGTERM and SIGINT on as
# SIGTERM, because a shell starts background commands with SIGINT ignored. It then exits with 75 (EX_TEMPFAIL) instead of 0, so that
# the scheduler restarts the run. Any other exit status is passed on.
set -eu
terminated=
child=
trap 'terminated=yes; [ -z "$child" ] || kill -TERM "$child"' TERM INT
"$@" &
child=$!
if [ -n "$terminated" ]; then
  kill -TERM "$child"
fi

# A signal interrupts `wait` while the command still runs: wait again.
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do
  status=0
  wait "$child" || status=$?
done
if [ -n "$terminated" ] && [ "$status" -eq 0 ]; then
  exit 75
fi
exit "$status"
