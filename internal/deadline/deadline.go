// Package deadline limits waits, in time that the process has to itself, without timers of Go's runtime: with its first timer
// the runtime opens descriptors (epoll) that it needs from then on, and a program that closes all descriptors that it does not
// know, as many do that go into the background, would end with that.
package deadline

import (
	"context"
	"sync/atomic"
	"time"
)

// Step is the most that counts of the time between two looks at a Deadline. A process that is stopped, as batch systems stop
// those that have to wait, or that a busy host does not let run, loses no more of its time than that.
const Step = 50 * time.Millisecond

// Deadline is a wait of at most Limit. It begins with the first look at it. The zero value is over.
type Deadline struct {
	Limit time.Duration
	last  time.Time
	spent time.Duration
}

// Left is what is left of the wait at a time that is no earlier than that of the look before; 0 or negative: it is over.
func (d *Deadline) Left(now time.Time) time.Duration {
	if d.Begun() {
		d.spent += min(now.Sub(d.last), Step)
	}
	d.last = now
	return d.Limit - d.spent
}

// Begun reports whether there was a look at it.
func (d *Deadline) Begun() bool { return !d.last.IsZero() }

// Poll calls done until it returns true, and reports whether it did so in time.
func (d *Deadline) Poll(done func() bool) bool {
	return Poll(func(now time.Time) bool { return d.Left(now) > 0 }, done)
}

// Poll calls done until it returns true, and reports whether it did so while goesOn returned true.
func Poll(goesOn func(now time.Time) bool, done func() bool) bool {
	const least, most = 50 * time.Microsecond, time.Millisecond
	for nap := least; goesOn(time.Now()); nap = min(2*nap, most) {
		if done() {
			return true
		}
		Nap(nap)
	}
	return false
}

// Context is a context with a deadline; context.Cause is context.DeadlineExceeded when that is over.
type Context struct {
	context.Context
	spent atomic.Int64 // ns
}

// WithTimeout is a context that is done after limit, or when cancel is called.
func WithTimeout(limit time.Duration) (ctx *Context, cancel context.CancelFunc) {
	const grain = 10 * time.Millisecond
	parent, end := context.WithCancelCause(context.Background())
	ctx = &Context{Context: parent}
	d := Deadline{Limit: limit}
	go func() {
		for left := d.Left(time.Now()); left > 0 && parent.Err() == nil; left = d.Left(time.Now()) {
			ctx.spent.Store(int64(d.spent))
			Nap(min(left, grain))
		}
		end(context.DeadlineExceeded)
	}()
	return ctx, func() { end(context.Canceled) }
}

// Spent is how much of the limit has passed.
func (c *Context) Spent() time.Duration { return time.Duration(c.spent.Load()) }
