// Package identity finds out which process of which job this is, from the variables that launchers set: torchrun and what
// follows its convention (accelerate, DeepSpeed, Ray Train, Kubeflow), Slurm, Open MPI, MPICH and Intel MPI, MVAPICH,
// and indexed jobs of Kubernetes.
//
// # Rules
//
// Rank, local rank and world size are of one launcher, the first of these that names a rank within its world size:
//
//  1. CISTERN_RANK, CISTERN_WORLD_SIZE: what the user says.
//  2. RANK, WORLD_SIZE: torchrun. It starts the processes itself, so it is nearer to them than the scheduler:
//     under `srun torchrun`, SLURM_PROCID is the number of the node.
//  3. OMPI_COMM_WORLD_RANK, then PMI_RANK, then MV2_COMM_WORLD_RANK.
//  4. SLURM_PROCID. A shell that salloc started has it too, with one task: then there is no rank.
//  5. JOB_COMPLETION_INDEX: a pod of an indexed job with one process, without a world size.
//
// A local rank that its launcher does not name is taken from another launcher that names the same rank and world size, as
// where a script sets RANK=$SLURM_PROCID. Each contradiction between launchers that claim the same is a disagreement,
// except that of nested launchers: the outer one has fewer processes.
//
// The job is the scheduler's: CISTERN_JOB, Slurm's job (of an array: its task), PBS's, LSF's, a pod's indexed job, Ray's job,
// then torchrun's run. The run is torchrun's where it has a name. CISTERN_COORDINATES are the places of the process in the
// dimensions of its job, such as "dp=3,tp=1".
package identity

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/recording"
)

// launcher is the variables in which one names a process.
type launcher struct{ name, rank, world, local string }

// launchers in the order of the rules.
var launchers = []launcher{
	{"cistern", "CISTERN_RANK", "CISTERN_WORLD_SIZE", "CISTERN_LOCAL_RANK"},
	{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
	{"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
	{"mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
	{"mvapich", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"},
	{"slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
	{"kubernetes", "JOB_COMPLETION_INDEX", "", ""},
}

// Variables that name jobs, runs and nodes, by the order in which they are looked at.
const (
	varJob      = "CISTERN_JOB"
	varPlace    = "CISTERN_COORDINATES"
	varSlurmJob = "SLURM_JOB_ID"
	varArrayJob = "SLURM_ARRAY_JOB_ID"
	varArrayOne = "SLURM_ARRAY_TASK_ID"
	varPBS      = "PBS_JOBID"
	varLSF      = "LSB_JOBID"
	varRay      = "RAY_JOB_ID"
	varRun      = "TORCHELASTIC_RUN_ID"
	varPod      = "HOSTNAME"
	varIndex    = "JOB_COMPLETION_INDEX"
	varRestart  = "TORCHELASTIC_RESTART_COUNT"
	varRequeue  = "SLURM_RESTART_COUNT"
	varNode     = "SLURMD_NODENAME"
	varGroup    = "GROUP_RANK"
	varNodeRank = "NODE_RANK"
	varNodeID   = "SLURM_NODEID"
	varCommit   = "CISTERN_COMMIT"
)

// Variables are the names of all that is looked at. A recorder that cannot apply the rules keeps these for a reader that can.
func Variables() []string {
	names := []string{varJob, varPlace, varSlurmJob, varArrayJob, varArrayOne, varPBS, varLSF, varRay, varRun, varPod, varRestart, varRequeue,
		varNode, varGroup, varNodeRank, varNodeID, varCommit}
	for _, l := range launchers {
		for _, name := range []string{l.rank, l.world, l.local} {
			if name != "" {
				names = append(names, name)
			}
		}
	}
	return names
}

// mostText is the most bytes of a name.
const mostText = 256

// Of is the identity that variables tell; host is the name of the machine, "" unknown.
func Of(getenv func(string) string, host string, pid int) recording.Identity {
	v := variables(func(name string) string {
		s := strings.TrimSpace(getenv(name))
		return text.Clean(s[:min(len(s), mostText)])
	})
	id := recording.Identity{NodeRank: -1, Rank: -1, LocalRank: -1, World: -1, PID: pid, Node: text.Clean(host[:min(len(host), mostText)])}
	if id.Node == "" {
		id.Node = v(varNode)
	}
	v.setRank(&id)
	v.setJob(&id)
	v.setCoordinates(&id)
	id.Commit = v(varCommit)
	id.Restart, id.Requeue = max(0, v.number(varRestart)), max(0, v.number(varRequeue))
	for _, name := range []string{varGroup, varNodeRank, varNodeID} {
		if n := v.number(name); n >= 0 {
			id.NodeRank = n
			break
		}
	}
	return id
}

type variables func(name string) string

// number is that of a variable, -1 where there is none.
func (v variables) number(name string) int {
	if name == "" {
		return -1
	}
	n, err := strconv.ParseUint(v(name), 10, 31)
	if err != nil {
		return -1
	}
	return int(n)
}

// claim is what one launcher says.
type claim struct {
	launcher
	r, w, l int
}

// claims are those that name a rank, in the order of the rules; what is no rank is a disagreement.
func (v variables) claims(id *recording.Identity) (list []claim) {
	for _, l := range launchers {
		c := claim{l, v.number(l.rank), v.number(l.world), v.number(l.local)}
		switch {
		case v(l.rank) == "":
		case c.r < 0:
			id.Disagreements = append(id.Disagreements, fmt.Sprintf("%s is %q; expected a number", l.rank, v(l.rank)))
		case c.w >= 0 && c.r >= c.w:
			id.Disagreements = append(id.Disagreements, fmt.Sprintf("%s is %d of %s %d; it is not used", l.rank, c.r, l.world, c.w))
		case c.w < 0 && l.name == "torchrun":
			id.Disagreements = append(id.Disagreements, fmt.Sprintf("%s is %d without %s; it is not used", l.rank, c.r, l.world))
		case c.w <= 1 && l.name == "slurm": // one task: salloc's shell, or the launcher of others
		default:
			list = append(list, c)
		}
	}
	return list
}

func (v variables) setRank(id *recording.Identity) {
	list := v.claims(id)
	if len(list) == 0 {
		if v.number("WORLD_SIZE") == 1 || v.number("SLURM_NTASKS") == 1 {
			id.Rank, id.LocalRank, id.World = 0, 0, 1
		}
		return
	}
	first := list[0]
	id.Launcher, id.Rank, id.World, id.LocalRank = first.name, first.r, first.w, first.l
	for _, c := range list[1:] {
		switch {
		case c.w < 0: // an index of a pod, which may be that of a node
		case c.r == first.r && c.w == first.w:
			if id.LocalRank < 0 {
				id.LocalRank = c.l
			}
			if first.l >= 0 && c.l >= 0 && c.l != first.l {
				id.Disagreements = append(id.Disagreements, fmt.Sprintf("%s is %d and %s %d; the first is used", first.local, first.l, c.local, c.l))
			}
		case first.w < 0 || c.w >= first.w:
			id.Disagreements = append(id.Disagreements, fmt.Sprintf("%s says rank %d of %d, %s rank %d of %d; the first is used",
				first.name, first.r, first.w, c.name, c.r, c.w))
		}
	}
}

func (v variables) setJob(id *recording.Identity) {
	if run := v(varRun); run != "none" {
		id.Run = run
	}
	slurm := v(varSlurmJob)
	if array, one := v(varArrayJob), v(varArrayOne); array != "" && one != "" {
		slurm = array + "_" + one
	}
	for _, job := range []string{v(varJob), slurm, v(varPBS), v(varLSF), v.podJob(), v(varRay), id.Run} {
		if job != "" {
			id.Job = job
			break
		}
	}
	if id.Run == id.Job {
		id.Run = ""
	}
}

// setCoordinates takes those of CISTERN_COORDINATES: "dp=3,tp=1".
func (v variables) setCoordinates(id *recording.Identity) {
	for item := range strings.SplitSeq(v(varPlace), ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(item), "=")
		n, err := strconv.ParseUint(value, 10, 31)
		if name == "" || err != nil {
			if item != "" {
				id.Disagreements = append(id.Disagreements, fmt.Sprintf("%s has %q; expected NAME=NUMBER", varPlace, item))
			}
			continue
		}
		if id.Coordinates == nil {
			id.Coordinates = map[string]int{}
		}
		id.Coordinates[name] = int(n)
	}
}

// Known reports whether anything is known of a process's place in a job.
func Known(id *recording.Identity) bool {
	return id.Job != "" || id.Rank >= 0 || len(id.Coordinates) > 0
}

// podJob is the name of an indexed job, whose pods have the host name JOB-INDEX.
func (v variables) podJob() string {
	index := v(varIndex)
	if index == "" {
		return ""
	}
	job, found := strings.CutSuffix(v(varPod), "-"+index)
	if !found {
		return ""
	}
	return job
}
