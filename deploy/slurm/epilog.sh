#!/bin/sh
# Epilog of Slurm: takes what processes of the job recorded on this node to the folder that all nodes share, as the job's user.
# What cannot be taken stays on the node. Slurm would drain a node whose epilog fails.
. "$(dirname "$0")/cistern.conf"
from=$LOCAL/$SLURM_JOB_ID
[ -d "$from" ] || exit 0
if [ -z "$(ls -A "$from")" ] ||
  timeout "$SECONDS_AT_MOST" setpriv --reuid "$SLURM_JOB_UID" --regid "$(id -g "$SLURM_JOB_UID")" --init-groups -- \
    "$CISTERN" fleet collect --as-is "$from" "$SHARED/$SLURM_JOB_ID"; then
  rm -rf "$from"
else
  echo "cistern: recordings of job $SLURM_JOB_ID stay in $from" >&2
fi
exit 0
