package dataset

import (
	"encoding/json"
	"path/filepath"

	"github.com/cistern-gpu/cistern/export"
	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/recording"
)

const deviceDoc = "number of the GPU in the process"

// field is a column of a table and its cell in the row of a process's device.
type field struct {
	export.Column
	of func(p *process) any
}

// process is a device of a summary.
type process struct {
	*fleet.Summary
	*fleet.Device
	id     recording.Identity
	commit string
}

func text(name, doc string, of func(p *process) string) field {
	return field{export.Column{Name: name, Type: export.Text, Null: true, Doc: doc}, func(p *process) any { return known(of(p)) }}
}

func number(name, doc string, of func(p *process) int64) field {
	return field{export.Column{Name: name, Type: export.Int, Doc: doc}, func(p *process) any { return of(p) }}
}

// perhaps is a number that is unknown below 0.
func perhaps(name, doc string, of func(p *process) int64) field {
	return field{export.Column{Name: name, Type: export.Int, Null: true, Doc: doc}, func(p *process) any {
		if n := of(p); n >= 0 {
			return n
		}
		return nil
	}}
}

// known is a text, or null for none.
func known(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// coordinate is the process's place in a dimension, -1 for none.
func coordinate(dimension string) func(p *process) int64 {
	return func(p *process) int64 {
		if n, ok := p.id.Coordinates[dimension]; ok {
			return int64(n)
		}
		return -1
	}
}

// failure is a number of the first request that failed, -1 where none did.
func failure(of func(f *fleet.Failure) int64) func(p *process) int64 {
	return func(p *process) int64 {
		if len(p.Failures) == 0 {
			return -1
		}
		return of(&p.Failures[0])
	}
}

var fields = []field{
	text("summary", "name of the process's summary", func(p *process) string { return filepath.Base(p.Path) }),
	text("run", "the launcher's name of the run, where it has one beside the job's", func(p *process) string { return p.id.Run }),
	number("requeue", "how often the scheduler started the job anew", func(p *process) int64 { return int64(p.id.Requeue) }),
	text("launcher", "that the rank is of: torchrun, openmpi, mpi, mvapich, slurm, kubernetes, cistern", func(p *process) string { return p.id.Launcher }),
	text("node", "name of the machine", func(p *process) string { return p.id.Node }),
	perhaps("node_rank", "number of the node in the job", func(p *process) int64 { return int64(p.id.NodeRank) }),
	perhaps("local_rank", "number of the process on its node", func(p *process) int64 { return int64(p.id.LocalRank) }),
	perhaps("world_size", "number of ranks", func(p *process) int64 { return int64(p.id.World) }),
	number("pid", "number of the process on its node", func(p *process) int64 { return int64(p.id.PID) }),
	text("program", "name of the script", func(p *process) string { return p.Program }),
	text("commit", "version of the program: CISTERN_COMMIT of the process, else --commit", func(p *process) string { return p.commit }),
	perhaps("dp", "place in data parallelism (cistern.fleet.describe)", coordinate("dp")),
	perhaps("tp", "place in tensor parallelism", coordinate("tp")),
	perhaps("pp", "pipeline stage", coordinate("pp")),
	text("coordinates", "all places, as JSON", func(p *process) string { return coordinates(p.id.Coordinates) }),
	text("allocator", "pytorch or cistern", func(p *process) string { return p.Allocator }),
	text("settings", "of the allocator: CISTERN_CONF or PYTORCH_ALLOC_CONF", func(p *process) string { return p.Settings }),
	text("cistern", "version of Cistern", func(p *process) string { return p.Version }),
	text("pytorch", "version of PyTorch", func(p *process) string { return p.PyTorch }),
	text("cuda", "version of CUDA", func(p *process) string { return p.CUDA }),
	text("driver", "version of the driver", func(p *process) string { return p.Driver }),
	number("started_us", "microseconds since 1970 when CUDA started", func(p *process) int64 { return p.StartedUS }),
	number("updated_us", "microseconds since 1970 when the summary was written last", func(p *process) int64 { return p.UpdatedUS }),
	text("ended", "exit where Python ended; null where the process went on, or was killed", func(p *process) string { return p.Ended }),
	number("steps", "step marks", func(p *process) int64 { return p.Steps }),
	number("device", deviceDoc, func(p *process) int64 { return int64(p.Ordinal) }),
	text("gpu_uuid", "of the GPU", func(p *process) string { return p.UUID }),
	text("gpu_name", "of the GPU", func(p *process) string { return p.Name }),
	number("total_bytes", "memory of the GPU", func(p *process) int64 { return int64(p.Total) }),
	perhaps("limit_bytes", "of the process, where it had one", limit),
	number("peak_allocated_bytes", "the most that was allocated", func(p *process) int64 { return int64(p.PeakAllocated.Bytes) }),
	number("peak_allocated_step", "the step when it was", func(p *process) int64 { return p.PeakAllocated.Step }),
	number("peak_reserved_bytes", "the most that was reserved", func(p *process) int64 { return int64(p.PeakReserved.Bytes) }),
	number("peak_reserved_step", "the step when it was", func(p *process) int64 { return p.PeakReserved.Step }),
	number("peak_split_bytes", "free memory in segments in use, at the peak of what was reserved", func(p *process) int64 { return int64(p.PeakReserved.Split) }),
	number("peak_outside_bytes", "the most that was in use on the GPU beside what was reserved", func(p *process) int64 { return int64(p.PeakOutside.Bytes) }),
	number("needed_bytes", "peak_reserved_bytes and peak_outside_bytes: a GPU with so much memory would have been enough",
		func(p *process) int64 { return int64(p.PeakReserved.Bytes + p.PeakOutside.Bytes) }),
	number("retries", "how often cached memory was returned to meet a request", func(p *process) int64 { return p.Retries }),
	number("ooms", "requests that failed", func(p *process) int64 { return p.OOMs }),
	perhaps("failed_us", "microseconds since 1970 of the first request that failed", failure(func(f *fleet.Failure) int64 { return f.TimeUS })),
	perhaps("failed_step", "its step", failure(func(f *fleet.Failure) int64 { return f.Step })),
	perhaps("failed_requested_bytes", "its size", failure(func(f *fleet.Failure) int64 { return int64(f.Requested) })),
	perhaps("failed_free_bytes", "free memory of the GPU then", failure(func(f *fleet.Failure) int64 { return int64(f.Free) })),
}

func limit(p *process) int64 {
	if p.Limit == 0 {
		return -1
	}
	return int64(p.Limit)
}

func coordinates(of map[string]int) string {
	if len(of) == 0 {
		return ""
	}
	text, _ := json.Marshal(of) // of numbers: it cannot fail
	return string(text)
}

// Tables are those of a dataset: first those of summaries, then those of recordings.
var Tables = []*export.Table{Processes, Steps, export.ByStack, export.Tables[0], export.Tables[1]}

// RecordingColumn is the last of each table of recordings.
var RecordingColumn = export.Column{Name: "recording", Type: export.Text, Doc: "name of the file that the row is of"}

// Processes and Steps are the tables of summaries.
var (
	Processes = &export.Table{Name: "processes", What: "one row for each process and GPU", Columns: columnsOf(fields)}
	Steps     = &export.Table{Name: "steps", What: "one row for each step of a process on a GPU, or for several steps where there were many", Columns: []export.Column{
		{Name: "device", Type: export.Int, Doc: deviceDoc},
		{Name: "step", Type: export.Int, Doc: "the last step of the row, from 1"},
		{Name: "every", Type: export.Int, Doc: "steps of a row"},
		{Name: "time_us", Type: export.Int, Doc: "microseconds since 1970 at its end, by the clock of the node"},
		{Name: "allocated_bytes", Type: export.Int, Doc: "at its end"},
		{Name: "peak_allocated_bytes", Type: export.Int, Doc: "the most that was seen within the row"},
		{Name: "reserved_bytes", Type: export.Int, Doc: "the most that was seen at the ends of steps"},
		{Name: "outside_bytes", Type: export.Int, Doc: "in use on the GPU beside that, the same way"},
		{Name: "requests", Type: export.Int, Doc: "number of requests"},
		{Name: "requested_bytes", Type: export.Int, Doc: "their bytes"},
		{Name: "hash", Type: export.Uint, Null: true, Doc: "of the sizes of the requests in their order; null where unknown"},
	}}
)

func columnsOf(fields []field) []export.Column {
	columns := make([]export.Column, len(fields))
	for i := range fields {
		columns[i] = fields[i].Column
	}
	return columns
}

func processRows(s *fleet.Summary, commit string) [][]any {
	id := s.Identity()
	if id.Commit != "" {
		commit = id.Commit
	}
	rows := make([][]any, len(s.Devices))
	for i := range s.Devices {
		p := &process{s, &s.Devices[i], id, commit}
		for k := range fields {
			rows[i] = append(rows[i], fields[k].of(p))
		}
	}
	return rows
}

func stepRows(s *fleet.Summary, _ string) (rows [][]any) {
	for i := range s.Devices {
		d := &s.Devices[i]
		for k := range d.Series.Len() {
			r := d.Series.Row(k)
			var hash any
			if r.HashSum != 0 {
				hash = r.HashSum
			}
			rows = append(rows, []any{int64(d.Ordinal), r.Step, d.Series.Every, r.TimeUS, int64(r.Now), int64(r.Peak), int64(r.Reserved),
				int64(r.Outside), int64(r.Requests), int64(r.Requested), hash})
		}
	}
	return rows
}
