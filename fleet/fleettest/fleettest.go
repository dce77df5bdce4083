// Package fleettest makes summaries of jobs for tests: of a recorded run, with ranks, stages of a pipeline, seeded jitter, and
// faults that are planted.
package fleettest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/recording"
)

// Job is how a job is made.
type Job struct {
	Name   string
	Ranks  int
	Stages int // of a pipeline: rank / (Ranks / Stages) is the stage
	Steps  int
	PerGPU uint64 // bytes of a GPU
	Seed   uint64
	// Lengths: each rank's batches have lengths of their own, so that sizes differ.
	Lengths bool
}

const (
	gpusOfNode = 8
	stepUS     = 400_000
	// period is how many different steps a run has, which repeat.
	period  = 32
	startUS = 1_750_000_000_000_000
)

// Make makes the summaries of a job from one recorded run, that of each rank before the next. A later stage has smaller blocks.
func Make(t *recording.Trace, j Job, each func(rank int, s *fleet.Summary)) {
	ends := make([]int64, 0, period)
	for i := 1; i <= period; i++ {
		ends = append(ends, t.Events[i*(len(t.Events)-1)/period].TimeUS)
	}
	rows := fleet.Steps(t, ends)
	for rank := range j.Ranks {
		each(rank, j.rank(rows, rank))
	}
}

func (j *Job) rank(rows []fleet.Row, rank int) *fleet.Summary {
	r := rand.New(rand.NewPCG(j.Seed, uint64(rank)))
	stage := rank * j.Stages / j.Ranks
	node := rank / gpusOfNode
	scale := func(bytes uint64) uint64 { return bytes / 16 * uint64(16-stage) &^ 511 }
	s := &fleet.Summary{Format: fleet.Version, Version: "test", Allocator: fleet.AllocatorPyTorch, Host: fmt.Sprintf("gpu%03d", node), PID: 1000 + rank, Program: "train.py",
		Variables: map[string]string{"RANK": fmt.Sprint(rank), "WORLD_SIZE": fmt.Sprint(j.Ranks), "LOCAL_RANK": fmt.Sprint(rank % gpusOfNode), "GROUP_RANK": fmt.Sprint(node),
			"SLURM_JOB_ID": j.Name, "SLURM_PROCID": fmt.Sprint(node), "SLURM_NTASKS": fmt.Sprint((j.Ranks + gpusOfNode - 1) / gpusOfNode)},
		Coordinates: map[string]int{"dp": rank % (j.Ranks / j.Stages), "pp": stage}, PyTorch: "2.11.0+cu130", CUDA: "13.0", Driver: "580.65.06", StartedUS: startUS,
		Ended: fleet.EndExit, Marks: "optimizer", Steps: int64(j.Steps)}
	d := fleet.Device{Ordinal: rank % gpusOfNode, UUID: fmt.Sprintf("GPU-%06d", rank), Name: "NVIDIA H100 80GB HBM3", Total: j.PerGPU}
	outside := uint64(600<<20) + r.Uint64N(8<<20)
	for i := range j.Steps {
		row := rows[i%len(rows)]
		row.Step = int64(i) + 1
		row.TimeUS = startUS + int64(i+1)*stepUS + r.Int64N(20_000)
		row.Now, row.Peak, row.Reserved, row.Requested = scale(row.Now), scale(row.Peak), scale(row.Reserved), scale(row.Requested)
		row.Outside, row.HashSum = outside, 0
		if j.Lengths {
			row.Peak += r.Uint64N(64 << 20)
			row.Requested += r.Uint64N(1 << 30)
		}
		s.UpdatedUS = row.TimeUS
		peak := func(p *fleet.Peak, bytes uint64) {
			if bytes > p.Bytes {
				*p = fleet.Peak{Bytes: bytes, Step: row.Step, TimeUS: row.TimeUS, Allocated: row.Peak, Reserved: row.Reserved, Split: (row.Reserved - row.Peak) / 4, Outside: outside}
			}
		}
		row.Reserved = max(row.Reserved, row.Peak)
		peak(&d.PeakAllocated, row.Peak)
		peak(&d.PeakReserved, row.Reserved)
		peak(&d.PeakOutside, outside)
		d.Series.Add(row)
	}
	s.Devices = []fleet.Device{d}
	return s
}

// Write writes a summary into a folder, under a name of its own, which it returns.
func Write(dir string, s *fleet.Summary) (string, error) {
	path := filepath.Join(dir, fmt.Sprintf("rank%s-%s-%d-%x%s", s.Variables["RANK"], s.Host, s.PID, s.StartedUS/1000, fleet.Ending))
	return path, s.Write(path)
}

// The faults that may be planted.

// Fragment has so many bytes lie free in segments in use.
func Fragment(s *fleet.Summary, bytes uint64) {
	d := &s.Devices[0]
	d.PeakReserved.Bytes += bytes
	d.PeakReserved.Reserved += bytes
	d.PeakReserved.Split += bytes
	for i := range d.Series.Reserved {
		d.Series.Reserved[i] += bytes
	}
}

// Leak has memory grow with each step.
func Leak(s *fleet.Summary, bytes uint64) {
	d := &s.Devices[0]
	for i, step := range d.Series.Step {
		more := bytes * uint64(step)
		d.Series.Now[i] += more
		d.Series.Peak[i] += more
		d.Series.Reserved[i] += more
		for _, p := range []*fleet.Peak{&d.PeakAllocated, &d.PeakReserved} {
			if now := d.Series.Peak[i]; now > p.Bytes {
				p.Bytes, p.Step, p.TimeUS, p.Allocated = now, step, d.Series.TimeUS[i], d.Series.Peak[i]
			}
		}
	}
	d.PeakReserved.Reserved = d.PeakReserved.Bytes
}

// Beside has so much more in use outside the allocator.
func Beside(s *fleet.Summary, bytes uint64) {
	d := &s.Devices[0]
	d.PeakOutside.Bytes += bytes
	for i := range d.Series.Outside {
		d.Series.Outside[i] += bytes
	}
}

// Clock puts a node's clock forward.
func Clock(s *fleet.Summary, us int64) {
	s.StartedUS += us
	s.UpdatedUS += us
	for i := range s.Devices[0].Series.TimeUS {
		s.Devices[0].Series.TimeUS[i] += us
	}
}

// Fail has a request of so many bytes fail at the end, for which too little was free.
func Fail(s *fleet.Summary, requested uint64) {
	d := &s.Devices[0]
	d.OOMs = 1
	p := &d.PeakReserved
	d.Failures = []fleet.Failure{{TimeUS: s.UpdatedUS, Step: s.Steps, Requested: requested, Allocated: p.Allocated, Reserved: p.Bytes, Split: p.Split,
		Free: d.Total - min(d.Total, p.Bytes+d.PeakOutside.Bytes)}}
}

// Kill has a process end at a step, without a last summary.
func Kill(s *fleet.Summary, steps int64) {
	s.Ended, s.Steps = fleet.EndNone, steps
	old := s.Devices[0].Series
	s.Devices[0].Series = fleet.Series{}
	for i := range old.Len() {
		if row := old.Row(i); row.Step <= steps {
			s.Devices[0].Series.Add(row)
			s.UpdatedUS = row.TimeUS
		}
	}
}

// Truncate cuts a file in the middle.
func Truncate(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	return os.Truncate(path, st.Size()/2)
}
