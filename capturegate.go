package cistern

import (
	"sync"

	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// captureGate keeps waits for a device's whole context and announced captures on that device apart, because such a wait
// invalidates every capture of the context (cuda.Driver.ContextSynchronize). A wait does not start while a capture is
// announced, and the announcement of a capture waits until those that have started are over. The Allocator has one for
// each device, also while the device is not in use: a peer may wait for its context.
type captureGate struct {
	mu   lockrank.Mutex
	over sync.Cond // signalled when the last wait is over
	// +checklocks:mu
	captures int // announced and not ended
	// +checklocks:mu
	blocked int // of these, those that wait
	// +checklocks:mu
	waits int // waits for the context that have started
}

func newCaptureGates(n int) []captureGate {
	gates := make([]captureGate, n)
	for i := range gates {
		gates[i].mu.Rank = lockrank.Gate
		gates[i].over.L = &gates[i].mu
	}
	return gates
}

// announce notes a capture: from now on no wait starts, and those that have started are over. No lock may be held.
func (g *captureGate) announce() {
	lockrank.MayWait()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.captures++
	g.blocked++
	for g.waits > 0 {
		g.over.Wait()
	}
	g.blocked--
}

// end ends what announce began.
func (g *captureGate) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.captures--
}

// announced reports whether a capture is under way, as far as that was announced.
func (g *captureGate) announced() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.captures > 0
}

// startWait reports whether a wait for the context may start; then endWait ends it.
func (g *captureGate) startWait() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.captures > 0 {
		return false
	}
	g.waits++
	return true
}

func (g *captureGate) endWait() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.waits--; g.waits == 0 {
		g.over.Broadcast()
	}
}
