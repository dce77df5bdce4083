package broker

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/ledger"
	"github.com/cistern-gpu/cistern/internal/node/policy"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// mostPause bounds how long a client may take to pause or resume: contents are copied.
const mostPause = 10 * time.Minute

// pausings are what a client was asked to pause or resume and has not answered.
type pausings struct {
	mu    sync.Mutex
	last  uint64                           // +checklocks:mu
	open  map[uint64]chan protocol.Message // +checklocks:mu
	ended bool                             // +checklocks:mu
}

// begin is a question's number and where its answer comes in; the channel is closed where the client ends.
func (p *pausings) begin() (uint64, chan protocol.Message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	answer := make(chan protocol.Message, 1)
	if p.ended {
		close(answer)
		return 0, answer
	}
	if p.open == nil {
		p.open = map[uint64]chan protocol.Message{}
	}
	p.last++
	p.open[p.last] = answer
	return p.last, answer
}

// answered passes an answer on. One that no question waits for is dropped.
func (p *pausings) answered(m protocol.Message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if answer := p.open[m.ID]; answer != nil {
		delete(p.open, m.ID)
		answer <- m
	}
}

// forget ends a question that is not waited for any more.
func (p *pausings) forget(id uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, id)
}

// end ends all questions.
func (p *pausings) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	for id, answer := range p.open {
		delete(p.open, id)
		close(answer)
	}
}

// pause has the clients with a label that a user may command pause or resume, all at once, and returns what each did.
func (b *Broker) pause(by *client, m protocol.Message) ([]protocol.PauseResult, error) {
	if m.Label == "" {
		return nil, fmt.Errorf("%s: expected a label", m.Kind)
	}
	if err := policy.CheckPattern(m.Label); err != nil {
		return nil, err
	}
	type target struct {
		c    *client
		slot ledger.Slot
	}
	var all []target
	var results []protocol.PauseResult
	b.mu.Lock()
	for _, c := range b.clients {
		if c == by || !operates(by.uid) && c.uid != by.uid || !policy.Match(m.Label, c.label) {
			continue
		}
		for _, slot := range c.slots {
			all = append(all, target{c, slot})
			results = append(results, protocol.PauseResult{Client: uint64(c.id), PID: c.pid, Name: c.name, Label: c.label, Device: UUID(b.uuids[slot])})
		}
	}
	b.mu.Unlock()
	var wg sync.WaitGroup
	for i, x := range all {
		wg.Go(func() { x.c.pauseOne(m, x.slot, &results[i]) })
	}
	wg.Wait()
	slices.SortFunc(results, func(x, y protocol.PauseResult) int { return int(x.Client) - int(y.Client) })
	for _, r := range results {
		b.log.Info("a client was asked to "+m.Kind.String(), "client", r.Client, "pid", r.PID, "device", r.Device, "bytes", r.Bytes, "took", r.Seconds, "error", r.Error, "by_uid", by.uid)
	}
	return results, nil
}

// pauseOne asks one client about one device, and waits for its answer.
func (c *client) pauseOne(m protocol.Message, slot ledger.Slot, r *protocol.PauseResult) {
	began := time.Now()
	id, answer := c.pausings.begin()
	defer c.pausings.forget(id)
	what := protocol.Message{Kind: protocol.Pausing, ID: id, Slot: uint64(slot)}
	if m.Kind == protocol.Pause {
		what.Keep = 1
	}
	wait := min(max(m.Wait, time.Second), mostPause)
	if !c.send(what) {
		r.Error = "the process does not accept messages"
		return
	}
	late := time.NewTimer(wait)
	defer late.Stop()
	select {
	case a, ok := <-answer:
		r.Bytes, r.Error, r.Denied = a.Bytes, a.Text, a.Keep == 1
		if !ok {
			r.Error = "the process has ended"
		}
	case <-late.C:
		r.Error = fmt.Sprintf("no answer within %v", wait)
	}
	r.Seconds = time.Since(began).Seconds()
}
