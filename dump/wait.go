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

// after is closed when so long has passed, unless stop is called before.
func after(d time.Duration) (over <-chan struct{}, stop func()) {
	c := make(chan struct{})
	var stopped atomic.Bool
	go func() {
		if pass(d, nap, &stopped) {
			close(c)
		}
	}()
	return c, func() { stopped.Store(true) }
}

// pass waits until so long has passed, and says whether it has: not where it was stopped before. nap says how long it took.
func pass(d time.Duration, nap func(time.Duration) time.Duration, stopped *atomic.Bool) bool {
	for d > 0 && !stopped.Load() {
		d -= min(nap(min(d, grain)), most)
	}
	return !stopped.Load()
}

func nap(d time.Duration) time.Duration {
	begin := time.Now()
	front.Nap(d)
	return time.Since(begin)
}

// within is a context that ends after so long.
func within(d time.Duration) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	over, stop := after(d)
	done := ctx.Done()
	go func() {
		select {
		case <-over:
			cancel(context.DeadlineExceeded)
		case <-done:
		}
	}()
	return ctx, func() { stop(); cancel(context.Canceled) }
}
