package replay

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync/atomic"
)

// What replays of one file may take is bounded by the size of the file, since recordings come from anywhere: a few bytes
// can say that terabytes are mapped again and again, or that ten thousand streams hold a block each. The bound counts
// steps, so that it is the same on every machine. A step is what a model does for an ordinary event,
// 0.03 to 0.08 µs.
const (
	workBase    = 12 << 20
	workPerByte = 64 // of a small file: about a second for one of 64 KiB
	// Of what is beyond a small file, as much as recordings need: tune of recording/testdata/multistream_prefetch, the densest
	// one, takes 40 million steps for 94 KB.
	smallFile       = 64 << 10
	workPerByteMore = 1536
)

// bound is the number of steps that all replays of the file may take.
func (w *Work) bound() int64 {
	return workBase + workPerByte*min(w.stored, smallFile) + workPerByteMore*max(0, w.stored-smallFile)
}

// AtOnce is how many replays of the trace may run at a time, as each has memory of its own: two of a small file, and one more for
// every 4 KiB beyond.
func (p *Plan) AtOnce() int {
	n := runtime.GOMAXPROCS(0)
	if p.work.stored == 0 {
		return n
	}
	return min(n, 2+int(min(max(0, p.work.stored-smallFile)/4096, math.MaxInt16)))
}

// What a run, a pool and a stream cost before the first event.
const (
	stepsPerRun    = 1 << 10
	stepsPerPool   = 32
	stepsPerStream = 8
)

// ErrWork is the error of a run that takes more steps than a file of its size may cause.
var ErrWork = errors.New("the replay takes more steps")

// Work counts the steps of all replays of one file: of its devices, searches and pages together. Runs on several goroutines
// share it.
type Work struct {
	done   atomic.Int64
	stored int64 // bytes of the file; 0: a trace that was not read from one has no bound
}

// NewWork is the work of a file of that size (recording.Trace.StoredBytes).
func NewWork(stored int64) *Work { return &Work{stored: stored} }

// counted is the plan with what a run's options say of its work.
func (p *Plan) counted(opt Options) *Plan {
	c := *p
	c.work, c.searched = cmp.Or(opt.Work, p.work), opt.Search
	return &c
}

// take adds steps, and reports whether they are too many. Searches leave a quarter to what is replayed beside them.
func (p *Plan) take(steps int64) error {
	n, limit := p.work.done.Add(steps), p.work.bound()
	if p.searched {
		limit -= limit / 4
	}
	if p.work.stored == 0 || n <= limit {
		return nil
	}
	return fmt.Errorf("%w than the %d million that a file of %d bytes may cause; no valid recording does", ErrWork, limit/1e6, p.work.stored)
}

// stepper is a policy that takes more than one step for some events.
type stepper interface {
	// steps are those since the last call.
	steps() int64
}
