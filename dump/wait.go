package dump

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/internal/front"
)

// Waiting without timers of Go's, which would have the runtime open descriptors that a program may close (front.Nap).

// grain is how exactly time is kept here, most how much of it counts at once: of a process that is stopped, as batch systems stop
// those that have to wait, the time does not pass.
const (
	grain = 10 * time.Millisecond
	most  = 10 * grain
)

// timer is over when so long has passed, unless it is stopped before.
type timer struct {
	over    chan struct{}
	passed  atomic.Int64 // ns
	stopped atomic.Bool
}

func after(d time.Duration) *timer {
	t := &timer{over: make(chan struct{})}
	go func() {
		if t.pass(d, nap) {
			close(t.over)
		}
	}()
	return t
}

// pass waits until so long has passed, and says whether it has: not where it was stopped before. nap says how long it took.
func (t *timer) pass(d time.Duration, nap func(time.Duration) time.Duration) bool {
	for left := d; left > 0 && !t.stopped.Load(); left = d - t.spent() {
		t.passed.Add(int64(min(nap(min(left, grain)), most)))
	}
	return !t.stopped.Load()
}

func (t *timer) spent() time.Duration { return time.Duration(t.passed.Load()) }
func (t *timer) stop()                { t.stopped.Store(true) }

func nap(d time.Duration) time.Duration {
	begin := time.Now()
	front.Nap(d)
	return time.Since(begin)
}

// within is a context that ends after so long.
func within(d time.Duration) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	t := after(d)
	done := ctx.Done()
	go func() {
		select {
		case <-t.over:
			cancel(context.DeadlineExceeded)
		case <-done:
		}
	}()
	return ctx, func() { t.stop(); cancel(context.Canceled) }
}
