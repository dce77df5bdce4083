package timeline

import (
	"sync"

	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// Gate keeps waits for a device's whole context and announced captures on that device apart, because such a wait
// invalidates every capture of the context (cuda.Driver.ContextSynchronize). A wait does not start while a capture is
// announced, and the announcement of a capture waits until the waits that have started are over. A process has one for each
// device, also while the device is not in use: a peer may wait for its context.
type Gate struct {
	mu   lockrank.Mutex
	over sync.Cond // signalled when the last wait is over
	// +checklocks:mu
	captures int // announced and not ended
	// +checklocks:mu
	blocked int // of these, those that wait
	// +checklocks:mu
	waits int // waits for the context that have started
}

// NewGates are the gates of n devices, by ordinal.
func NewGates(n int) []Gate {
	gates := make([]Gate, n)
	for i := range gates {
		gates[i].mu.Rank = lockrank.Gate
		gates[i].over.L = &gates[i].mu
	}
	return gates
}

// Announce notes a capture: from now on no wait starts, and those that have started are over. No lock may be held.
func (g *Gate) Announce() {
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

// End ends what Announce began.
func (g *Gate) End() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.captures--
}

// Announced reports whether an announced capture is under way.
func (g *Gate) Announced() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.captures > 0
}

// Blocked reports whether a capture waits until it can be announced. While the gate is in use elsewhere the answer is no.
//
// +checklocksignore: TryLock is not known to the analyser
func (g *Gate) Blocked() bool {
	if !g.mu.TryLock() {
		return false
	}
	defer g.mu.Unlock()
	return g.blocked > 0 && g.waits > 0
}

// startWait reports whether a wait for the context may start; then endWait ends it.
func (g *Gate) startWait() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.captures > 0 {
		return false
	}
	g.waits++
	return true
}

func (g *Gate) endWait() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.waits--; g.waits == 0 {
		g.over.Broadcast()
	}
}
