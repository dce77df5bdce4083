package broker

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/ledger"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/units"
)

// asking is a question of a client, from Ask to Done.
type asking struct {
	c      *client
	id     uint64 // the client's number for it
	slot   ledger.Slot
	grant  uint64
	need   uint64
	until  time.Time
	began  time.Time
	cancel context.CancelFunc
	words  []string // for the report of a failed request
	waited time.Duration
}

// question is what a victim was asked and has not answered.
type question struct {
	id     uint64
	part   ledger.Part
	sent   time.Time
	answer chan answer
}

type answer struct {
	released uint64
	words    string
	took     time.Duration
	left     bool
	within   time.Duration // that it had
}

// ask begins to answer a question.
func (c *client) ask(ctx context.Context, m protocol.Message, asked *sync.WaitGroup) error {
	slot, err := c.slot(m)
	if err != nil {
		return err
	}
	b := c.b
	b.counts.Asks.Add(1)
	c.mu.Lock()
	_, again := c.asks[m.ID]
	if again || len(c.asks) >= mostAsks {
		c.mu.Unlock()
		if again {
			return fmt.Errorf("question %d is open already", m.ID)
		}
		c.send(protocol.Message{Kind: protocol.Granted, ID: m.ID, Slot: m.Slot, Text: fmt.Sprintf("the broker refused: %d questions are open", mostAsks)})
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	now := time.Now()
	a := &asking{c: c, id: m.ID, slot: slot, need: m.Bytes, began: now, until: now.Add(min(max(m.Wait, 0), mostWait)), cancel: cancel}
	c.asks[m.ID] = a
	c.mu.Unlock()
	b.mu.Lock()
	before, _ := b.ledger.Account(c.id, slot)
	id, delay, ok := b.ledger.Ask(b.now(), c.id, slot, m.Bytes)
	b.ledger.Leaves(id, m.Keep)
	b.ledger.More(id, m.Total)
	if m.Limit == protocol.OnlyUnused {
		b.ledger.OnlyUnused(id)
	}
	after, _ := b.ledger.Account(c.id, slot)
	b.mu.Unlock()
	if !ok {
		cancel()
		return fmt.Errorf("question %d is about a device that the client does not use", m.ID)
	}
	a.grant = id
	b.counts.loads[slot].began(now, after.Refaults > before.Refaults)
	asked.Go(func() {
		granted, answered := uint64(0), false
		defer func() { b.counts.loads[slot].ended(time.Now(), a.need, granted, answered) }()
		a.run(ctx, delay)
		if answered = ctx.Err() == nil; answered {
			granted = a.reply()
		}
	})
	return nil
}

// done ends a question, answered or not.
func (c *client) done(id uint64) {
	c.mu.Lock()
	a := c.asks[id]
	delete(c.asks, id)
	c.mu.Unlock()
	if a != nil {
		a.cancel()
		c.b.end(a)
	}
}

func (c *client) cancelAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range c.asks {
		a.cancel()
	}
}

// end ends a grant.
func (b *Broker) end(a *asking) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if t := b.expiry[a.grant]; t != nil {
		t.Stop()
		delete(b.expiry, a.grant)
	}
	b.ledger.End(a.grant)
	b.show(a.slot)
}

// pause waits, and reports whether the question goes on.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// decide is the ledger's decision, with the questions to victims that follow from it.
func (a *asking) decide(fresh bool) (d ledger.Decision, sent []*question) {
	b := a.c.b
	b.mu.Lock()
	defer b.mu.Unlock()
	d = b.ledger.Decide(b.now(), a.grant)
	if d.Verdict != ledger.Take {
		return d, nil
	}
	instead := ledger.Decision{}
	switch {
	case time.Until(a.until) <= -overtime:
		instead = ledger.Decision{Verdict: ledger.Refuse, Why: "there was no time to ask others"}
	case !fresh && pauses(d.Parts): // contents are copied for it, perhaps for figures that are old
		instead = ledger.Decision{Verdict: ledger.Wait}
	case b.opt.DryRun:
		return d, nil
	default:
		sent = b.put(d.Parts)
		b.show(a.slot)
		return d, sent
	}
	for _, p := range d.Parts {
		b.ledger.Cancel(p)
	}
	return instead, nil
}

// run has the ledger decide until the question is answered.
func (a *asking) run(ctx context.Context, delay time.Duration) {
	b := a.c.b
	if delay > 0 {
		a.words = append(a.words, fmt.Sprintf("the question waited %v, as this process asks too often", delay.Round(time.Millisecond)))
		if !pause(ctx, min(delay, max(time.Until(a.until)+overtime, 0))) { // a question without a wait has to wait too
			return
		}
	}
	waited, fresh, complete := false, false, false
	for ctx.Err() == nil {
		if !fresh {
			b.refresh(a.slot)
		}
		d, sent := a.decide(fresh)
		if !fresh && (d.Verdict == ledger.Wait || d.Verdict == ledger.Refuse) { // status segments may be as old as Every
			fresh = true
			complete = b.inquire(a.c.id, a.slot)
			continue
		}
		fresh = false
		if d.Verdict == ledger.Refuse && !complete && time.Since(a.began) < min(b.opt.Answer, a.until.Sub(a.began)) { // one that has not said yet may have it
			if !pause(ctx, again) {
				return
			}
			continue
		}
		switch d.Verdict {
		case ledger.Take:
			if b.opt.DryRun {
				b.cancel(d.Parts)
				for _, p := range d.Parts {
					b.notes.say(slog.LevelInfo, a.c.uid, "dry run: would ask a client", "client", p.Client, "bytes", p.Bytes, "pause", p.Pause)
				}
				a.words = append(a.words, fmt.Sprintf("dry run: %d processes would have been asked for %s", len(d.Parts), units.FormatBytes(a.need)))
				return
			}
			a.collect(ctx, sent)
			continue
		case ledger.Wait:
			if left := time.Until(a.until); left > 0 {
				waited = true
				if !pause(ctx, min(again, left)) {
					return
				}
				continue
			}
		}
		if d.Why != "" {
			a.words = append(a.words, d.Why)
		}
		break
	}
	if waited {
		a.waited = time.Since(a.began)
		b.mu.Lock()
		b.ledger.Waited(b.now(), a.grant)
		b.mu.Unlock()
	}
}

// cancel takes back parts that were decided and not asked for.
func (b *Broker) cancel(parts []ledger.Part) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range parts {
		b.ledger.Cancel(p)
	}
}

// put numbers questions for the parts.
//
// +checklocks:b.mu
func (b *Broker) put(parts []ledger.Part) (sent []*question) {
	for _, p := range parts {
		b.last++
		q := &question{id: b.last, part: p, answer: make(chan answer, 1)}
		b.open[q.id] = q
		sent = append(sent, q)
	}
	return sent
}

// collect asks the victims, and waits for their answers while the question goes on.
func (a *asking) collect(ctx context.Context, sent []*question) {
	b := a.c.b
	b.sendAll(sent)
	// Pauses come first in a decision, and take longer: contents are copied.
	n := slices.IndexFunc(sent, func(q *question) bool { return !q.part.Pause })
	if n < 0 {
		n = len(sent)
	}
	left := time.Until(a.until) + overtime
	a.gather(ctx, sent[n:], min(b.opt.Answer, left))
	a.gather(ctx, sent[:n], left)
	b.mu.Lock()
	b.show(a.slot)
	b.mu.Unlock()
}

// gather waits for the answers of victims for so long.
func (a *asking) gather(ctx context.Context, sent []*question, left time.Duration) {
	if len(sent) == 0 {
		return
	}
	b := a.c.b
	late := time.NewTimer(left)
	for i, q := range sent {
		r, ok := b.await(ctx, q, late)
		if !ok { // the asker's end does not wait for victims
			b.served.Go(func() { b.awaitAll(sent[i:], late) })
			return
		}
		r.within = left
		a.words = append(a.words, a.about(q, r))
	}
	late.Stop()
}

// await waits for the answer of a victim, until it is late. ok is false where the context ended before.
func (b *Broker) await(ctx context.Context, q *question, late *time.Timer) (r answer, ok bool) {
	show := time.NewTicker(showEvery)
	defer show.Stop()
	for waits := true; waits; {
		select {
		case r = <-q.answer:
			return r, true
		case <-ctx.Done():
			return r, false
		case <-show.C: // the segment has grants for a while only
			b.mu.Lock()
			b.show(q.part.Slot)
			b.mu.Unlock()
		case <-late.C:
			waits = false
		}
	}
	late.Reset(0) // for the others too
	select {
	case r = <-q.answer:
	default:
		r = b.miss(q)
	}
	return r, true
}

// awaitAll ends questions whose answers no asker waits for.
func (b *Broker) awaitAll(sent []*question, late *time.Timer) {
	defer late.Stop()
	for _, q := range sent {
		b.await(context.Background(), q, late)
	}
}

// sendAll sends questions.
func (b *Broker) sendAll(sent []*question) {
	type ask struct {
		to *client
		m  protocol.Message
	}
	var asks []ask
	b.mu.Lock()
	for _, q := range sent {
		if b.open[q.id] != nil {
			q.sent = time.Now()
			asks = append(asks, ask{b.clients[q.part.Client], q.request()})
		}
	}
	b.mu.Unlock()
	until := time.Now().Add(sendTime) // for all
	for _, x := range asks {
		if x.to != nil {
			x.to.sendBy(until, x.m)
		}
	}
}

const (
	// mostInquired is how many clients are asked what they have now, those with the most reserved; inquireTime how long they have.
	mostInquired = 64
	inquireTime  = 20 * time.Millisecond
)

// inquiries are those about one device.
type inquiries struct {
	waiting atomic.Int64 // askers that wait for the end of one
	mu      sync.Mutex
	now     *inquiry // under way; nil: none; +checklocks:mu
}

// inquiry is one question to the clients of a device what they have.
type inquiry struct {
	began    time.Time
	over     chan struct{}
	complete bool // all that were asked have answered; to be read when it is over
}

// inquire has the other clients of the device say what they have from now on, and reports whether all that were asked have answered.
// Askers share an inquiry; those that come while one is under way share the next one.
func (b *Broker) inquire(by ledger.ClientID, slot ledger.Slot) (complete bool) {
	came, all := time.Now(), &b.inquiries[slot]
	all.waiting.Add(1)
	defer all.waiting.Add(-1)
	for {
		all.mu.Lock()
		q := all.now
		if q == nil {
			q = &inquiry{began: time.Now(), over: make(chan struct{})}
			all.now = q
			all.mu.Unlock()
			if all.waiting.Load() > 1 {
				by = 0 // others want to know of this one too
			}
			q.complete = b.inquireOf(by, slot)
			all.mu.Lock()
			all.now = nil
			all.mu.Unlock()
			close(q.over)
			return q.complete
		}
		all.mu.Unlock()
		<-q.over
		if !q.began.Before(came) {
			return q.complete
		}
	}
}

// inquireOf asks the clients of a device but one, 0 for none.
func (b *Broker) inquireOf(but ledger.ClientID, slot ledger.Slot) (complete bool) {
	b.mu.Lock()
	all := b.ledger.Accounts(slot)
	all = slices.DeleteFunc(all, func(x ledger.Account) bool { return x.Client == but || b.ledger.Mute(x.Client) })
	slices.SortStableFunc(all, byReserved)
	var parts []ledger.Part
	for _, x := range all[:min(len(all), mostInquired)] {
		parts = append(parts, ledger.Part{Client: x.Client, Slot: slot})
	}
	sent := b.put(parts)
	b.mu.Unlock()
	b.sendAll(sent)
	late := time.NewTimer(inquireTime)
	defer late.Stop()
	for _, q := range sent {
		select {
		case <-q.answer:
		case <-late.C:
			late.Reset(0) // for the others too
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	complete = true
	for _, q := range sent {
		complete = complete && b.open[q.id] == nil
		delete(b.open, q.id)
	}
	return complete
}

// byReserved is the order of accounts by what they have reserved, the most first.
func byReserved(x, y ledger.Account) int { return cmp.Compare(y.Status.Reserved, x.Status.Reserved) }

// miss ends a question that was not answered in time, unless it has been meanwhile.
func (b *Broker) miss(q *question) answer {
	b.mu.Lock()
	if b.open[q.id] == nil {
		b.mu.Unlock()
		return <-q.answer
	}
	delete(b.open, q.id)
	b.ledger.Missed(q.part)
	c := b.clients[q.part.Client] // it is one until its questions are ended
	b.mu.Unlock()
	b.counts.Skipped.Add(1)
	b.counts.loads[q.part.Slot].missed()
	words := "a client does not answer, and is skipped from now on"
	if q.part.Pause {
		words = "a client did not pause in time"
	}
	b.notes.say(slog.LevelWarn, c.uid, words, "client", c.id, "pid", c.pid, "bytes", q.part.Bytes, "within", time.Since(q.sent).Round(time.Millisecond))
	return answer{took: -1}
}

// gave is a victim's answer. One that comes too late only says what it has.
func (b *Broker) gave(c *client, m protocol.Message) {
	q, took := b.answered(c, m)
	if q == nil || q.part.Bytes == 0 {
		return
	}
	level := slog.LevelDebug
	if m.Text != "" {
		level = slog.LevelInfo
	}
	b.notes.say(level, c.uid, "memory was given back", "client", c.id, "pid", c.pid, "asked", q.part.Bytes, "released", m.Bytes, "took", took,
		"error", protocol.Clean(m.Text, mostSaid))
}

// mostSaid is how much of a client's words is logged.
const mostSaid = 1 << 10

// answered takes an answer, and returns the question that it ends, nil for none.
func (b *Broker) answered(c *client, m protocol.Message) (q *question, took time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	slot := ledger.Slot(m.Slot)
	if !slices.Contains(c.slots, slot) {
		return nil, 0
	}
	if m.Text != "" && m.Status == (protocol.Status{}) { // it says only why it did nothing
		a, _ := b.ledger.Account(c.id, slot)
		m.Status = a.Status
	} else {
		c.heard[slot] = time.Now()
	}
	if q = b.open[m.ID]; q == nil || q.part.Client != c.id {
		b.ledger.Update(c.id, slot, m.Status)
		return nil, 0
	}
	delete(b.open, m.ID)
	// More than was asked for is not this grant's: chunks are released whole, a pause returns all, and clients may lie.
	released := min(m.Bytes, q.part.Bytes+maxExcess)
	if q.part.Pause {
		released = min(m.Bytes, b.ledger.Total(slot))
	}
	b.ledger.Gave(b.now(), q.part, released, m.Status)
	b.show(q.part.Slot)
	b.counts.Given.Add(released)
	took = time.Since(q.sent)
	if q.part.Bytes == 0 { // it was asked what it has
		q.answer <- answer{}
		return q, took
	}
	b.counts.loads[slot].gave(q.part, released)
	b.observeGift(slot, released, took)
	q.answer <- answer{released: released, words: m.Text, took: took}
	return q, took
}

// maxExcess is how much more than it was asked for a victim's answer may count.
const maxExcess = 1 << 30

// about is one victim's part in the report.
func (a *asking) about(q *question, r answer) string {
	who := a.c.b.nameOf(q.part.Client, a.c)
	switch {
	case r.left:
		return who + " ended"
	case r.took < 0:
		return fmt.Sprintf("%s did not answer within %v", who, r.within.Round(time.Millisecond))
	}
	words := fmt.Sprintf("%s released %s of %s in %v", who, units.FormatBytes(r.released), units.FormatBytes(q.part.Bytes), r.took.Round(100*time.Microsecond))
	if q.part.Pause {
		words = fmt.Sprintf("%s paused, which released %s, in %v", who, units.FormatBytes(r.released), r.took.Round(100*time.Microsecond))
	}
	if r.words != "" {
		words += " (" + r.words + ")"
	}
	return words
}

// nameOf names a client to another one. Those of other users have no name.
func (b *Broker) nameOf(id ledger.ClientID, to *client) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.named(b.clients[id], to)
}

// +checklocks:b.mu
func (b *Broker) named(c *client, to *client) string {
	if c == nil {
		return "a process"
	}
	if to.uid != 0 && c.uid != to.uid {
		return "a process of another user"
	}
	return fmt.Sprintf("process %d (%s)", c.pid, c.name)
}

// refresh reads the status of all clients of a device.
func (b *Broker) refresh(slot ledger.Slot) {
	type status struct {
		c  *client
		s  protocol.Status
		at time.Time
	}
	b.mu.Lock()
	now := b.now()
	if b.fresh[slot] != 0 && now-b.fresh[slot] < freshFor {
		b.mu.Unlock()
		return
	}
	b.fresh[slot] = now
	uuid := b.uuids[slot]
	var all []*client
	for _, c := range b.clients {
		if slices.Contains(c.slots, slot) {
			all = append(all, c)
		}
	}
	b.mu.Unlock()
	var read []status
	for _, c := range all {
		if s, at, ok := c.status(uuid); ok {
			read = append(read, status{c, s, at})
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, x := range read {
		if x.at.After(x.c.heard[slot]) { // its last answer is not newer
			b.ledger.Update(x.c.id, slot, x.s)
		}
	}
}

// most is the longest part of the report that names what others have.
const most = 3

// holders are the processes with the most memory of the device, for the report.
func (a *asking) holders() string {
	b := a.c.b
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.ledger.Accounts(a.slot)
	all = slices.DeleteFunc(all, func(x ledger.Account) bool { return x.Client == a.c.id })
	slices.SortStableFunc(all, byReserved)
	if len(all) == 0 {
		return "no other process is connected to the broker"
	}
	var words []string
	for _, x := range all[:min(len(all), most)] {
		words = append(words, fmt.Sprintf("%s has %s reserved, %s of it in use", b.named(b.clients[x.Client], a.c), units.FormatBytes(x.Status.Reserved),
			units.FormatBytes(x.Status.Active)))
	}
	if n := len(all) - most; n > 0 {
		words = append(words, fmt.Sprintf("%d other processes have memory as well", n))
	}
	return one(words...)
}

// reply sends the asker what it was granted, and returns that.
func (a *asking) reply() (got uint64) {
	b := a.c.b
	b.mu.Lock()
	got = b.ledger.Result(a.grant)
	if got > 0 {
		b.expiry[a.grant] = time.AfterFunc(GrantLasts, func() { b.expire(a) })
	}
	b.mu.Unlock()
	if got < a.need {
		if a.waited > 0 {
			a.words = append(a.words, fmt.Sprintf("waited %v", a.waited.Round(time.Millisecond)))
		}
		a.words = append(a.words, a.holders())
	}
	if got == 0 {
		a.forget()
	}
	level := slog.LevelDebug // metrics count what goes well
	if got < a.need {
		level = slog.LevelInfo
	}
	b.notes.say(level, a.c.uid, "a question is answered", "client", a.c.id, "pid", a.c.pid, "name", a.c.name, "need", a.need, "granted", got, "took", time.Since(a.began),
		"words", protocol.Clean(one(a.words...), mostSaid))
	b.observeAnswer(a.slot, a.need, got, time.Since(a.began))
	a.c.send(protocol.Message{Kind: protocol.Granted, ID: a.id, Slot: uint64(a.slot), Bytes: got, Text: one(a.words...)})
	return got
}

// expire ends a grant whose asker did not.
func (b *Broker) expire(a *asking) {
	b.mu.Lock()
	_, open := b.expiry[a.grant]
	b.mu.Unlock()
	if open {
		b.notes.say(slog.LevelWarn, a.c.uid, "a grant is over, which its client did not end", "client", a.c.id, "pid", a.c.pid, "after", GrantLasts)
		a.forget()
	}
}

// forget ends a grant that its asker need not end.
func (a *asking) forget() {
	a.c.b.end(a)
	a.c.mu.Lock()
	defer a.c.mu.Unlock()
	if a.c.asks[a.id] == a {
		delete(a.c.asks, a.id)
	}
}
