package identity

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cistern-gpu/cistern/recording"
)

func TestRules(t *testing.T) {
	const unknown = -1
	for _, c := range []struct {
		name, variables string
		want            recording.Identity
	}{
		{"a program alone", "", recording.Identity{NodeRank: unknown, Rank: unknown, LocalRank: unknown, World: unknown}},
		{"torchrun", "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 GROUP_RANK=1 TORCHELASTIC_RUN_ID=exp7 TORCHELASTIC_RESTART_COUNT=2",
			recording.Identity{Job: "exp7", Restart: 2, Launcher: "torchrun", NodeRank: 1, Rank: 5, LocalRank: 1, World: 8}},
		{"torchrun without a name", "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none",
			recording.Identity{Launcher: "torchrun", NodeRank: unknown, Rank: 0, LocalRank: 0, World: 2}},
		{"srun, a task a GPU", "SLURM_JOB_ID=77 SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_RESTART_COUNT=1",
			recording.Identity{Job: "77", Requeue: 1, Launcher: "slurm", NodeRank: 1, Rank: 9, LocalRank: 1, World: 16}},
		{"srun torchrun: SLURM_PROCID is the node", "SLURM_JOB_ID=77 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=1 " +
			"RANK=9 LOCAL_RANK=1 WORLD_SIZE=16 GROUP_RANK=1 TORCHELASTIC_RUN_ID=r",
			recording.Identity{Job: "77", Run: "r", Launcher: "torchrun", NodeRank: 1, Rank: 9, LocalRank: 1, World: 16}},
		{"torchrun on one node under srun", "SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 RANK=3 LOCAL_RANK=3 WORLD_SIZE=8",
			recording.Identity{Job: "77", Launcher: "torchrun", NodeRank: unknown, Rank: 3, LocalRank: 3, World: 8}},
		{"a script that sets RANK for srun", "SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1 RANK=9 WORLD_SIZE=16",
			recording.Identity{Launcher: "torchrun", NodeRank: unknown, Rank: 9, LocalRank: 1, World: 16}},
		{"an old RANK in the shell that srun was called from", "SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1 RANK=0 WORLD_SIZE=16 LOCAL_RANK=0",
			recording.Identity{Launcher: "torchrun", NodeRank: unknown, Rank: 0, LocalRank: 0, World: 16,
				Disagreements: []string{"torchrun says rank 0 of 16, slurm rank 9 of 16; the first is used"}}},
		{"local ranks that differ", "SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1 RANK=9 WORLD_SIZE=16 LOCAL_RANK=2",
			recording.Identity{Launcher: "torchrun", NodeRank: unknown, Rank: 9, LocalRank: 2, World: 16,
				Disagreements: []string{"LOCAL_RANK is 2 and SLURM_LOCALID 1; the first is used"}}},
		{"RANK without WORLD_SIZE", "RANK=3 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1",
			recording.Identity{Launcher: "slurm", NodeRank: unknown, Rank: 1, LocalRank: 1, World: 2,
				Disagreements: []string{"RANK is 3 without WORLD_SIZE; it is not used"}}},
		{"a rank beyond its world", "RANK=8 WORLD_SIZE=8", recording.Identity{NodeRank: unknown, Rank: unknown, LocalRank: unknown, World: unknown,
			Disagreements: []string{"RANK is 8 of WORLD_SIZE 8; it is not used"}}},
		{"what is no number", "RANK=two WORLD_SIZE=8", recording.Identity{NodeRank: unknown, Rank: unknown, LocalRank: unknown, World: unknown,
			Disagreements: []string{`RANK is "two"; expected a number`}}},
		{"a shell of salloc", "SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_NODEID=0",
			recording.Identity{Job: "77", NodeRank: 0, Rank: 0, LocalRank: 0, World: 1}},
		{"an array of Slurm", "SLURM_JOB_ID=80 SLURM_ARRAY_JOB_ID=78 SLURM_ARRAY_TASK_ID=2 SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_LOCALID=1",
			recording.Identity{Job: "78_2", Launcher: "slurm", NodeRank: unknown, Rank: 1, LocalRank: 1, World: 4}},
		{"mpirun", "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 PBS_JOBID=12.server",
			recording.Identity{Job: "12.server", Launcher: "openmpi", NodeRank: unknown, Rank: 3, LocalRank: 1, World: 4}},
		{"mpirun under Slurm, a task a node", "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 SLURM_JOB_ID=5 SLURM_PROCID=1 SLURM_NTASKS=2",
			recording.Identity{Job: "5", Launcher: "openmpi", NodeRank: unknown, Rank: 3, LocalRank: 1, World: 4}},
		{"MPICH", "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 LSB_JOBID=9", recording.Identity{Job: "9", Launcher: "mpi", NodeRank: unknown, Rank: 3, LocalRank: 1, World: 4}},
		{"MVAPICH", "MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1",
			recording.Identity{Launcher: "mvapich", NodeRank: unknown, Rank: 3, LocalRank: 1, World: 4}},
		{"an indexed job of Kubernetes", "JOB_COMPLETION_INDEX=2 HOSTNAME=train-2", recording.Identity{Job: "train", Launcher: "kubernetes", NodeRank: unknown, Rank: 2, LocalRank: unknown, World: unknown}},
		{"torchrun in its pods", "JOB_COMPLETION_INDEX=1 HOSTNAME=train-1 RANK=9 LOCAL_RANK=1 WORLD_SIZE=16 GROUP_RANK=1",
			recording.Identity{Job: "train", Launcher: "torchrun", NodeRank: 1, Rank: 9, LocalRank: 1, World: 16}},
		{"Ray Train", "RAY_JOB_ID=01000000 RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 NODE_RANK=0",
			recording.Identity{Job: "01000000", Launcher: "torchrun", NodeRank: 0, Rank: 1, LocalRank: 1, World: 2}},
		{"what the user says", "CISTERN_JOB=mine CISTERN_RANK=4 CISTERN_WORLD_SIZE=6 CISTERN_LOCAL_RANK=0 SLURM_JOB_ID=7 RANK=1 WORLD_SIZE=2",
			recording.Identity{Job: "mine", Launcher: "cistern", NodeRank: unknown, Rank: 4, LocalRank: 0, World: 6}},
		{"coordinates", "CISTERN_COORDINATES=dp=3,tp=1,pp=x RANK=1 WORLD_SIZE=2", recording.Identity{Launcher: "torchrun", NodeRank: unknown, Rank: 1, LocalRank: unknown, World: 2,
			Coordinates: map[string]int{"dp": 3, "tp": 1}, Disagreements: []string{`CISTERN_COORDINATES has "pp=x"; expected NAME=NUMBER`}}},
		{"a hostile name", "CISTERN_JOB=a\x1b[31mb", recording.Identity{Job: "a\ufffd[31mb", NodeRank: unknown, Rank: unknown, LocalRank: unknown, World: unknown}},
	} {
		set := map[string]string{}
		for _, item := range strings.Fields(c.variables) {
			name, value, _ := strings.Cut(item, "=")
			if set[name] = value; !slices.Contains(Variables(), name) {
				t.Errorf("%s: %s is not among Variables", c.name, name)
			}
		}
		c.want.Node, c.want.PID = "n1", 4711
		got := Of(func(name string) string { return set[name] }, "n1", 4711)
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
	}
}

func TestNodeName(t *testing.T) {
	got := Of(func(name string) string { return map[string]string{"SLURMD_NODENAME": "gpu17"}[name] }, "", 1)
	if got.Node != "gpu17" {
		t.Errorf("node %q", got.Node)
	}
}
