#!/bin/sh
# slurm.sh: runs what is in deploy/slurm under Slurm, on this machine (python/tests/slurm.py).
set -eu
[ "$(id -u)" = 0 ] || { echo 'slurm.sh: Slurm starts jobs of other users: run this as root' >&2; exit 1; }
scripts/need.sh python3 munged slurmctld slurmd srun
exec python3 -m unittest -v python.tests.slurm
