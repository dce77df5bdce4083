// Package query measures what allocators cost a job that allocates as data-frame libraries do: the same queries, step
// for step, with memory straight from the driver (cuMemAlloc), from a stream-ordered pool of the driver's with release
// threshold 0 and without bound, and from Cistern.
//
// The job is made from a fixed seed. Base tables of several GiB stay in memory. A query scans two to four tables
// (compressed pages, headers, scratch, columns, null masks, strings), filters, joins by a hash table, computes columns
// with a temporary for each operator, aggregates and sorts: some hundreds of buffers of 8 bytes to tens of MiB, most of
// which live for an operator or two. Between allocations kernels write each buffer and compare it when it is used, every
// byte, so the time that they take is that of the bytes; where an operator needs a number from the device (how many rows
// a filter keeps), the host waits for the stream. So the host's time counts after every wait, and is hidden behind the
// kernels elsewhere, as in such programs.
//
// Every contender keeps what it caches from job to job, and the jobs of all take turns. Printed are the first job, which
// gets the memory, the median of the others, and where the host's time went in one more job that is measured call by
// call. "none" is the same job with every place decided beforehand: what no allocator can beat. -want makes the exit
// status say whether Cistern is the fastest and that many times as fast as direct allocation.
//
// With -driver sim it runs over the simulated device, whose clock has what driver calls cost on an H200 and kernels by
// their bytes, but nothing of what the engine's own code takes.
//
// Files: query.go flags; job.go the queries; memory.go the contenders; run.go the measuring; machine.go the devices;
// report.go the table.
package query

import (
	"fmt"
	"io"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/lab/cli"
)

// settings are the flags.
type settings struct {
	device   cli.Device
	threads  int
	queries  int
	rounds   int
	seed     uint64
	shape    shape
	opts     cistern.Options
	also     []string
	json     string
	want     float64
	resident uint64
}

// Run is the command.
func Run(args []string, out io.Writer) error {
	var s settings
	f := cli.NewFlags("query")
	f.Device(&s.device)
	f.JSON(&s.json)
	f.Conf(&s.opts)
	f.IntVar(&s.threads, "threads", 1, "threads that run queries at the same time, each on a stream of its own")
	f.IntVar(&s.queries, "queries", 24, "queries of a job, all threads together")
	f.IntVar(&s.rounds, "rounds", 15, "jobs of each contender, after the first")
	f.Uint64Var(&s.seed, "seed", 1, "what the queries are drawn from")
	f.Float64Var(&s.shape.scale, "scale", 1, "how many times as many rows")
	f.Size(&s.resident, "resident", "4GiB", "`bytes` of base tables")
	f.Func("also", "a resource by its `name` to compare as well; may be given several times", func(words string) error {
		s.also = append(s.also, words)
		return nil
	})
	f.Float64Var(&s.want, "want", 0, "fail unless Cistern is the fastest, and so many times as fast as direct allocation")
	if err := f.Parse(args, out); err != nil {
		return err
	}
	if s.threads < 1 || s.queries < s.threads || s.rounds < 1 || s.shape.scale <= 0 {
		return cli.Usage("-threads, -rounds and -queries are 1 or more, with a query for each thread, and -scale is above 0")
	}
	const columns = 64 // of the base tables
	s.shape.resident, s.shape.column = columns/s.threads, s.resident/columns
	s.shape.queries = s.queries / s.threads
	r, err := measure(&s)
	if err != nil {
		return err
	}
	r.print(out)
	if err := cli.WriteJSON(s.json, r); err != nil {
		return err
	}
	if s.want > 0 && !r.Met {
		return fmt.Errorf("expected Cistern to be the fastest, and %.2f times as fast as direct allocation; got %s, and Cistern %.2f times as fast", s.want,
			r.Fastest, r.of("cistern").Speed)
	}
	return nil
}

// measure makes the jobs and compares.
func measure(s *settings) (*report, error) {
	dev := s.device.ID
	m, err := s.device.Open(simulated)
	if err != nil {
		return nil, err
	}
	b := &bench{m: m, dev: dev}
	for i := range s.threads {
		b.jobs = append(b.jobs, newJob(s.seed+uint64(i)*1_000_003, s.shape))
		stream, err := m.StreamCreate(dev, false)
		if err != nil {
			return nil, err
		}
		defer m.StreamDestroy(dev, stream) // the process ends anyway
		b.streams = append(b.streams, stream)
	}
	list, err := contenders(m, dev, s.opts, s.also)
	if err != nil {
		return nil, err
	}
	list = append(list, planned(m, dev, b.jobs))
	r := &report{Driver: s.device.Driver, Seed: s.seed, Threads: s.threads, Rounds: s.rounds, Conf: s.opts.String()}
	r.describe(b.jobs)
	if r.Results, err = b.compare(list, s.rounds); err != nil {
		return nil, err
	}
	r.judge(s.want)
	return r, nil
}
