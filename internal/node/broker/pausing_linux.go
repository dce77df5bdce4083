package broker

import (
	"cmp"
	"fmt"
	"log/slog"
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
	open  map[uint64]chan protocol.Message // +checklocks:mu
	ended bool                             // +checklocks:mu
}

// begin is where the answer to a question comes in; the channel is closed where the client ends.
func (p *pausings) begin(id uint64) chan protocol.Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	answer := make(chan protocol.Message, 1)
	if p.ended {
		close(answer)
		return answer
	}
	if p.open == nil {
		p.open = map[uint64]chan protocol.Message{}
	}
	p.open[id] = answer
	return answer
}

// answered passes an answer on, and reports whether a question waited for it.
func (p *pausings) answered(m protocol.Message) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	answer := p.open[m.ID]
	if answer == nil {
		return false
	}
	delete(p.open, m.ID)
	answer <- m
	return true
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

// pause has the clients with a label that a user may command pause or resume, all at once, and returns what each did. A client does one
// device after the other, as it has one pause or resume under way at a time.
func (b *Broker) pause(by *client, m protocol.Message) (results []protocol.PauseResult, err error) {
	if m.Label == "" {
		return nil, fmt.Errorf("%s: expected a label", m.Kind)
	}
	if err := policy.CheckPattern(m.Label); err != nil {
		return nil, err
	}
	type target struct {
		c     *client
		slots []ledger.Slot
		did   []protocol.PauseResult
	}
	var all []target
	b.mu.Lock()
	for _, c := range b.clients {
		if c == by || !operates(by.uid) && c.uid != by.uid || !policy.Match(m.Label, c.label) {
			continue
		}
		x := target{c: c, slots: slices.Clone(c.slots)}
		for _, slot := range x.slots {
			x.did = append(x.did, protocol.PauseResult{Client: uint64(c.id), PID: c.pid, Name: c.name, Label: c.label, Device: UUID(b.uuids[slot])})
		}
		all = append(all, x)
	}
	b.mu.Unlock()
	slices.SortFunc(all, func(x, y target) int { return cmp.Compare(x.c.id, y.c.id) })
	until := time.Now().Add(min(max(m.Wait, time.Second), mostPause))
	var wg sync.WaitGroup
	for _, x := range all {
		wg.Go(func() {
			for i, slot := range x.slots {
				x.c.pauseOne(m.Kind, slot, until, &x.did[i])
			}
		})
	}
	wg.Wait()
	for _, x := range all {
		results = append(results, x.did...)
	}
	for _, r := range results {
		b.notes.say(slog.LevelInfo, by.uid, "a client was asked to "+m.Kind.String(), "client", r.Client, "pid", r.PID, "device", r.Device, "bytes", r.Bytes, "took", r.Seconds, "error", r.Error, "by_uid", by.uid)
	}
	return results, nil
}

// pauseOne asks one client about one device, and waits for its answer.
func (c *client) pauseOne(kind protocol.Kind, slot ledger.Slot, until time.Time, r *protocol.PauseResult) {
	began := time.Now()
	wait := until.Sub(began)
	if wait <= 0 {
		r.Error = "not asked: its other devices took all of the time"
		return
	}
	id := c.b.number()
	answer := c.pausings.begin(id)
	defer c.pausings.forget(id)
	what := protocol.Message{Kind: protocol.Pausing, ID: id, Slot: uint64(slot), Keep: protocol.PauseResume}
	if kind == protocol.Pause {
		what.Keep = protocol.PauseByCommand
	}
	if !c.send(what) {
		r.Error = "the process does not accept messages"
		return
	}
	late := time.NewTimer(wait)
	defer late.Stop()
	select {
	case a, ok := <-answer:
		r.Bytes, r.Error, r.Denied = a.Bytes, protocol.Clean(a.Text, mostListed), a.Keep == 1
		if !ok {
			r.Error = "the process has ended"
		}
	case <-late.C:
		r.Error = fmt.Sprintf("no answer within %v", wait.Round(time.Millisecond))
	}
	r.Seconds = time.Since(began).Seconds()
}

// number is one for a question to a client, which no other question has.
func (b *Broker) number() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last++
	return b.last
}

// pausable notes what a client lets the broker pause for others.
func (c *client) pausable(m protocol.Message) error {
	slot, err := c.slot(m)
	if err != nil {
		return err
	}
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	c.b.ledger.Pausable(c.id, slot, m.Bytes)
	return nil
}

// paused is the answer to a pause or resume: of a command, or of a question that another client asked.
func (b *Broker) paused(c *client, m protocol.Message) {
	if c.pausings.answered(m) {
		return
	}
	if m.Keep == 1 {
		b.mu.Lock()
		b.ledger.Pausable(c.id, ledger.Slot(m.Slot), 0)
		b.mu.Unlock()
	}
	q, took := b.answered(c, m)
	if q == nil || !q.part.Pause {
		return
	}
	b.notes.say(slog.LevelInfo, c.uid, "a client was paused for another one", "client", c.id, "pid", c.pid, "label", c.label, "asked", q.part.Bytes,
		"released", m.Bytes, "took", took, "error", protocol.Clean(m.Text, mostSaid))
}

// pauses reports whether a decision has memory in use paused.
func pauses(parts []ledger.Part) bool {
	return slices.ContainsFunc(parts, func(p ledger.Part) bool { return p.Pause })
}

// request is what the victim of a part is sent.
func (q *question) request() protocol.Message {
	p := &q.part
	if p.Pause {
		return protocol.Message{Kind: protocol.Pausing, ID: q.id, Slot: uint64(p.Slot), Keep: protocol.PauseForOthers}
	}
	return protocol.Message{Kind: protocol.GiveBack, ID: q.id, Slot: uint64(p.Slot), Bytes: p.Bytes, Keep: p.Keep, Hold: p.Hold}
}

// showEvery is how often grants are shown anew while a pause lasts: the segment has them for a while only.
const showEvery = GrantLasts / 2
