package query

import (
	"fmt"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/lab/meter"
)

// bench is a comparison that is under way.
type bench struct {
	m       gpu.Machine
	dev     cuda.Device
	jobs    []*job // one for each thread
	streams []cuda.Stream
}

// spent is where the host's time went in a run, summed over threads.
type spent struct {
	alloc, free, wait time.Duration
}

// of is where the time of a step goes; nil for a launch.
func (s *spent) of(w what) *time.Duration {
	switch w {
	case stepAlloc:
		return &s.alloc
	case stepFree:
		return &s.free
	case stepSync:
		return &s.wait
	}
	return nil
}

// job runs every thread's job once and returns how long that took, by the machine's clock. With sum it also adds
// up where the time went, and takes a little longer for it.
func (b *bench) job(mem []memory, sum *spent) (time.Duration, error) {
	if err := b.m.ContextSynchronize(b.dev); err != nil {
		return 0, err
	}
	began := b.m.Now()
	failed := make([]error, len(b.jobs))
	parts := make([]spent, len(b.jobs))
	var group sync.WaitGroup
	for i := range b.jobs {
		run := func() {
			failed[i] = within(b.m, b.dev, func() error {
				if sum == nil {
					return b.thread(i, mem[i], nil)
				}
				return b.thread(i, mem[i], &parts[i])
			})
		}
		if len(b.jobs) == 1 {
			run()
		} else {
			group.Go(run)
		}
	}
	group.Wait()
	for i, err := range failed {
		if err != nil {
			return 0, err
		}
		if sum != nil {
			sum.alloc += parts[i].alloc
			sum.free += parts[i].free
			sum.wait += parts[i].wait
		}
	}
	if err := b.m.ContextSynchronize(b.dev); err != nil {
		return 0, err
	}
	return b.m.Now() - began, nil
}

// thread runs one thread's job. With p, a clock runs around every call that is not a launch.
func (b *bench) thread(i int, mem memory, p *spent) (err error) {
	j, s := b.jobs[i], b.streams[i]
	at := make([]cuda.Ptr, j.buffers)
	for k := range j.steps {
		x := &j.steps[k]
		var part *time.Duration
		var began time.Duration
		if p != nil {
			if part = p.of(x.what); part != nil {
				began = b.m.Now()
			}
		}
		switch x.what {
		case stepAlloc:
			at[x.buffer], err = mem.alloc(x.size)
		case stepWrite:
			err = b.m.Fill(b.dev, s, at[x.buffer], x.size, x.seed)
		case stepRead:
			err = b.m.Check(b.dev, s, at[x.buffer], x.size, x.seed)
		case stepFree:
			err = mem.free(at[x.buffer], x.size)
		case stepSync:
			err = b.m.StreamSynchronize(b.dev, s)
		}
		if part != nil {
			*part += b.m.Now() - began
		}
		if err != nil {
			return fmt.Errorf("thread %d, step %d of %d: %w", i, k, len(j.steps), err)
		}
	}
	return nil
}

// result is what was measured of a contender.
type result struct {
	Name    string    `json:"name"`
	Words   string    `json:"words"`
	Cold    float64   `json:"cold_ms"`   // the first job, which gets the memory
	Times   []float64 `json:"times_ms"`  // the others
	Median  float64   `json:"median_ms"` // of them
	Speed   float64   `json:"speed"`     // how many times as fast as the first contender
	AllocMS float64   `json:"alloc_ms"`  // host time in allocations, in frees, and waiting for the device, in one more job
	FreeMS  float64   `json:"free_ms"`
	WaitMS  float64   `json:"wait_ms"`
	Held    int64     `json:"held_bytes"` // what the device had less of free when the job was done for the first time
}

// compare runs the jobs of all contenders, turn by turn, each time in another order, so that none has the machine's
// better moments. Each keeps what it caches while the others run.
func (b *bench) compare(list []*contender, rounds int) (results []*result, err error) {
	mem := make([][]memory, len(list))
	defer func() {
		for _, c := range list {
			if failed := c.close(); failed != nil && err == nil {
				err = fmt.Errorf("%s: %w", c.name, failed)
			}
		}
	}()
	for i, c := range list {
		before, _, err := b.m.MemInfo(b.dev)
		if err != nil {
			return nil, err
		}
		if mem[i], err = c.threads(b.streams); err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		took, err := b.job(mem[i], nil)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		after, _, err := b.m.MemInfo(b.dev)
		if err != nil {
			return nil, err
		}
		results = append(results, &result{Name: c.name, Words: c.words, Cold: meter.MS(took), Held: int64(before) - int64(after)})
	}
	for round := range rounds {
		for k := range list {
			i := (k + round) % len(list)
			if round%2 == 1 {
				i = len(list) - 1 - i
			}
			took, err := b.job(mem[i], nil)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", list[i].name, err)
			}
			results[i].Times = append(results[i].Times, meter.MS(took))
		}
	}
	for i, r := range results {
		var s spent
		if _, err := b.job(mem[i], &s); err != nil {
			return nil, fmt.Errorf("%s: %w", list[i].name, err)
		}
		r.AllocMS, r.FreeMS, r.WaitMS = meter.MS(s.alloc), meter.MS(s.free), meter.MS(s.wait)
		r.Median = meter.Median(r.Times)
		r.Speed = results[0].Median / r.Median
	}
	return results, b.m.Wrong()
}
