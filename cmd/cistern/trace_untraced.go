package main

import (
	"slices"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/nvml"
	"github.com/cistern-gpu/cistern/recording"
)

// lookout looks, beside the goroutine that reads the ring, for processes that use the driver and are not traced.
type lookout struct {
	watch *audit.Watch
	last  chan struct{} // closed: look once more, and no longer
	done  chan struct{}

	mu sync.Mutex
	// +checklocks:mu
	found []recording.Untraced // since the last call of take
}

const (
	// lookFirst spares programs that end at once: what they start has not come to the driver by then.
	lookFirst = 100 * time.Millisecond
	lookLeast = 200 * time.Millisecond
	lookMost  = 5 * time.Second
	// lookShare is the part of one processor's CPU time, as its inverse, that looking may take.
	lookShare = 200
	// lookTimeout is for a /proc that does not answer, as that of a process which the kernel holds.
	lookTimeout = time.Second
)

// newLookout begins to look, for a program that was started.
func newLookout(t *tracing) *lookout {
	l := &lookout{last: make(chan struct{}), done: make(chan struct{})}
	cards := t.rec.live.cards
	var busy func(pid int) bool
	if hostNumbers() {
		busy = func(pid int) bool { // of one that cannot be looked into, which is rare: NVML is asked only then
			return slices.ContainsFunc(cards.all(), func(d nvml.Device) bool {
				return slices.ContainsFunc(d.Processes, func(p nvml.Process) bool { return p.PID == pid && !p.Graphics })
			})
		}
	}
	l.watch = t.ring.NewWatch(t.cmd.Process.Pid, busy)
	t.rec.heard = l.watch.Heard
	go l.run()
	return l
}

func (l *lookout) run() {
	defer close(l.done)
	wait := lookFirst
	for looked := false; ; looked = true {
		select {
		case <-l.last:
			if looked {
				l.look()
			}
			return
		case <-time.After(wait):
		}
		wait = min(max(lookShare*l.look(), lookLeast), lookMost)
	}
}

// look takes so much CPU time.
func (l *lookout) look() time.Duration {
	list, took := l.watch.Look(time.Now())
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, u := range list {
		l.found = append(l.found, recording.Untraced{PID: uint32(u.PID), Program: u.Program, Why: u.Why})
	}
	return took
}

// take is the processes found since its last call.
func (l *lookout) take() []recording.Untraced {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := l.found
	l.found = nil
	return found
}

// end looks a last time, and is the processes found.
func (l *lookout) end() []recording.Untraced {
	close(l.last)
	ctx, cancel := deadline.WithTimeout(lookTimeout)
	defer cancel()
	select {
	case <-l.done:
	case <-ctx.Done():
	}
	return l.take()
}
