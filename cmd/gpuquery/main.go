// Command gpuquery measures what allocators cost a job that allocates as data-frame libraries do: the same queries, step
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
// Files: main.go flags; job.go the queries; memory.go the contenders; run.go the measuring; machine.go the devices;
// report.go the table and the JSON line.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/units"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// settings are the flags.
type settings struct {
	driver   string
	device   int
	threads  int
	queries  int
	rounds   int
	seed     uint64
	shape    shape
	conf     string
	also     []string
	json     string
	want     float64
	resident string
}

func run(args []string, out, errs io.Writer) int {
	var s settings
	f := flag.NewFlagSet("gpuquery", flag.ContinueOnError)
	f.SetOutput(errs)
	f.StringVar(&s.driver, "driver", "nvidia", "`driver`: nvidia, nvidia:/path/to/libcuda.so.1, sim or sim:SIZE")
	f.IntVar(&s.device, "device", 0, "`ordinal` of the GPU")
	f.IntVar(&s.threads, "threads", 1, "threads that run queries at the same time, each on a stream of its own")
	f.IntVar(&s.queries, "queries", 24, "queries of a job, all threads together")
	f.IntVar(&s.rounds, "rounds", 15, "jobs of each contender, after the first")
	f.Uint64Var(&s.seed, "seed", 1, "what the queries are drawn from")
	f.Float64Var(&s.shape.scale, "scale", 1, "how many times as many rows")
	f.StringVar(&s.resident, "resident", "4GiB", "bytes of base tables")
	f.StringVar(&s.conf, "conf", "", "Cistern's settings, as in CISTERN_CONF")
	f.Func("also", "a resource by its `name` to compare as well; may be said again", func(words string) error {
		s.also = append(s.also, words)
		return nil
	})
	f.StringVar(&s.json, "json", "", "also write the JSON line to `FILE`")
	f.Float64Var(&s.want, "want", 0, "fail unless Cistern is the fastest, and so many times as fast as direct allocation")
	if err := f.Parse(args); err != nil {
		return 2
	}
	resident, err := units.ParseBytes(s.resident)
	if err != nil || f.NArg() != 0 || s.threads < 1 || s.queries < s.threads || s.rounds < 1 || s.shape.scale <= 0 || s.device < 0 {
		fmt.Fprintln(errs, "gpuquery: takes flags only: -threads, -rounds and -queries of 1 or more, a query for each thread, -scale above 0,"+
			" -resident a size such as 4GiB")
		return 2
	}
	const columns = 64 // of the base tables
	s.shape.resident, s.shape.column = columns/s.threads, resident/columns
	s.shape.queries = s.queries / s.threads
	r, err := measure(&s)
	if err != nil {
		fmt.Fprintln(errs, "gpuquery:", err)
		return 1
	}
	r.print(out)
	if err := r.write(s.json); err != nil {
		fmt.Fprintln(errs, "gpuquery:", err)
		return 2
	}
	if s.want > 0 && !r.Met {
		fmt.Fprintf(errs, "gpuquery: %s\n", r.short(s.want))
		return 1
	}
	return 0
}

// measure makes the jobs and compares.
func measure(s *settings) (*report, error) {
	opts, err := cistern.ParseOptions(s.conf)
	if err != nil {
		return nil, fmt.Errorf("-conf: %w", err)
	}
	dev := cuda.Device(s.device)
	m, err := openMachine(s.driver, dev)
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
	list, err := contenders(m, dev, opts, s.also)
	if err != nil {
		return nil, err
	}
	list = append(list, planned(m, dev, b.jobs))
	r := &report{Driver: s.driver, Seed: s.seed, Threads: s.threads, Rounds: s.rounds, Conf: strings.TrimSpace(s.conf)}
	r.describe(b.jobs)
	if r.Results, err = b.compare(list, s.rounds); err != nil {
		return nil, err
	}
	r.judge(s.want)
	return r, nil
}
