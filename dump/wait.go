package dump

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/internal/front"
)

// Waiting without timers of Go's, which would have the runtime open descriptors that a program may close (front.Nap).

// grain is how exactly time is kept here.
const grain = 10 * time.Millisecond

// after is closed when so long has passed, unless stop is called before.
func after(d time.Duration) (over <-chan struct{}, stop func()) {
	c := make(chan struct{})
	var stopped atomic.Bool
	go func() {
		for end := time.Now().Add(d); !stopped.Load(); {
			left := time.Until(end)
			if left <= 0 {
				close(c)
				return
			}
			front.Nap(min(left, grain))
		}
	}()
	return c, func() { stopped.Store(true) }
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
