#!/bin/sh
# Prolog of Slurm: makes the folder in which processes of the job record, on the node's own disk.
# Slurm would drain a node whose prolog fails: the job runs without recordings then.
. "$(dirname "$0")/cistern.conf"
{ mkdir -p -m 755 "$LOCAL" && mkdir -p -m 700 "$LOCAL/$SLURM_JOB_ID" && chown "$SLURM_JOB_UID" "$LOCAL/$SLURM_JOB_ID"; } ||
  echo "cistern: $LOCAL/$SLURM_JOB_ID cannot be made: job $SLURM_JOB_ID is not recorded" >&2
exit 0
