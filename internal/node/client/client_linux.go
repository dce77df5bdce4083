package client

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/grants"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

const (
	// firstWait is how long the first use of a device waits for the broker's answer.
	firstWait = 250 * time.Millisecond
	// greetTime is how long the broker may take to answer a connection.
	greetTime = 5 * time.Second
	// grace is how much longer than the wait of a question its answer may take.
	grace = 750 * time.Millisecond
	// silence is how long a broker that did not answer is not asked.
	silence = 5 * time.Second
	// leastPause and mostPause are between two attempts to connect.
	leastPause  = time.Second
	mostPause   = 30 * time.Second
	searchPause = 10 * time.Second
	// look is how often the link's descriptor is looked at.
	look = 5 * time.Second
	// mostGives is how many requests of the broker wait.
	mostGives = 64
)

// Client is a process's connection to the broker.
type Client struct {
	cfg   Config
	link  atomic.Pointer[link] // nil: no broker
	tried atomic.Pointer[link] // the one that run has, also before the broker has answered
	page  atomic.Pointer[live.Page]
	first deadline.Event // the first attempt to connect is over
	ended deadline.Event // Close was called
	over  sync.WaitGroup
	gives chan protocol.Message
	sent  atomic.Uint64 // messages
	busy  atomic.Bool   // memory is paused or resumed for the node

	retired []*grants.View // not unmapped yet; of the goroutine that reads

	mu      sync.Mutex
	devices map[cuda.Device]*device   // +checklocks:mu
	asks    map[uint64]*pending       // +checklocks:mu
	last    uint64                    // number of a message; +checklocks:mu
	why     string                    // there is no link; +checklocks:mu
	silent  time.Time                 // until then the broker is not asked; +checklocks:mu
	table   atomic.Pointer[[]*device] // by ordinal, for Admit; replaced with mu
}

// device is what the client knows of one.
type device struct {
	id     cuda.Device
	uuid   [16]byte
	total  uint64
	slot   atomic.Int64   // in the grants; -1: the broker has not answered
	mine   atomic.Uint64  // granted to this process, or asked for
	got    atomic.Uint64  // granted to this process by the broker: other processes have released it
	joined deadline.Event // the broker has answered once
	spared atomic.Int64   // other processes had nothing unused: when to ask them for headroom again, ns since 1970

	mu   sync.Mutex
	open []openAsk // grants that stand; +checklocks:mu

	declaring  sync.Mutex // held while the broker is sent what it may pause
	declared   uint64     // that, as it was sent last; +checklocks:declaring
	declaredTo *link      // +checklocks:declaring
}

// openAsk is a grant.
type openAsk struct {
	id    uint64 // of the question; 0: the memory was free without the broker
	link  *link
	bytes uint64
}

// pending is a question that is not answered.
type pending struct {
	over  deadline.Event
	bytes uint64
	limit uint64
	words string
	lost  bool
}

// New makes a client and starts to connect.
func New(cfg Config) *Client {
	if cfg.Guard == nil {
		cfg.Guard = noGuard{}
	}
	c := &Client{cfg: cfg, gives: make(chan protocol.Message, mostGives), devices: map[cuda.Device]*device{}, asks: map[uint64]*pending{},
		why: "no broker is connected"}
	c.over.Go(c.run)
	c.over.Go(c.give)
	return c
}

// noGuard is for programs that do not fork.
type noGuard struct{}

func (noGuard) Opened(int)  {}
func (noGuard) Closing(int) {}

// Sockets are where a broker listens: root's, and the user's own.
func Sockets() []string {
	all := []string{"/run/cistern/node.sock"}
	if run := environ.Get("XDG_RUNTIME_DIR"); filepath.IsAbs(run) {
		all = append(all, filepath.Join(run, "cistern", "node.sock"))
	}
	return all
}

// Close ends the client. Questions that are open fail.
func (c *Client) Close() {
	c.ended.Set()
	if l := c.tried.Load(); l != nil {
		l.shut()
	}
	c.over.Wait()
}

// Sent is how many messages were sent.
func (c *Client) Sent() uint64 { return c.sent.Load() }

// Connected reports whether there is a broker, and why not.
func (c *Client) Connected() (bool, string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.link.Load() != nil, c.why
}

// Join notes that a device came into use. It waits a moment for a broker that is there.
func (c *Client) Join(dev cuda.Device, uuid [16]byte, total uint64) {
	if c.device(dev) != nil {
		return
	}
	c.mu.Lock()
	d := c.devices[dev]
	if d == nil {
		d = &device{id: dev, uuid: uuid, total: total}
		d.slot.Store(-1)
		c.devices[dev] = d
		table := make([]*device, 0, len(c.devices))
		if t := c.table.Load(); t != nil {
			table = append(table, *t...)
		}
		for int(dev) >= len(table) {
			table = append(table, nil)
		}
		table[dev] = d
		c.table.Store(&table)
	}
	c.mu.Unlock()
	wait := deadline.Deadline{Limit: firstWait}
	c.first.Wait(wait.Left(time.Now()))
	if l := c.link.Load(); l != nil {
		if d.slot.Load() < 0 {
			c.send(l, &protocol.Message{Kind: protocol.Join, ID: uint64(dev), UUID: uuid, Total: total})
		}
		d.joined.Wait(max(wait.Left(time.Now()), 0))
	}
}

// device finds a device without a lock; nil: it was not joined.
func (c *Client) device(dev cuda.Device) *device {
	t := c.table.Load()
	if t == nil || dev < 0 || int(dev) >= len(*t) {
		return nil
	}
	return (*t)[dev]
}

// Admit leaves alone what others were granted.
func (c *Client) Admit(dev cuda.Device, size uint64) bool {
	d := c.device(dev)
	return d == nil || c.admit(d, size, d.mine.Load())
}

// admit is Admit where so much of what the segment shows as granted is this process's.
func (c *Client) admit(d *device, size, mine uint64) bool {
	l := c.link.Load()
	if l == nil {
		return true
	}
	slot := d.slot.Load()
	view := l.view.Load()
	if slot < 0 || view == nil {
		return true
	}
	granted, released := view.Granted(uint64(slot))
	if granted == 0 {
		return true
	}
	others := granted - min(granted, mine)
	if got := d.got.Load(); got >= size { // what others were promised, and victims may never release, does not hold up a grant
		others = released - min(released, got)
	}
	if others == 0 {
		return true
	}
	free, err := c.cfg.Host.Free(d.id)
	return err != nil || free >= others && free-others >= size
}

// Ask asks the broker for memory of other processes, and waits for the answer. Where they have enough, the driver's headroom is part
// of it, so that Grown need not ask for it after the request.
func (c *Client) Ask(dev cuda.Device, need uint64, wait time.Duration) (granted uint64, note string) {
	m := protocol.Message{Kind: protocol.Ask, Bytes: need, Wait: wait}
	if d := c.device(dev); d != nil && c.cfg.Headroom != nil {
		m.Total = c.cfg.Headroom(d.total)
	}
	return c.ask(dev, m)
}

// ask is that for a question, of which the device is left out.
func (c *Client) ask(dev cuda.Device, m protocol.Message) (granted uint64, note string) {
	l, d := c.link.Load(), c.device(dev)
	if l == nil || d == nil || d.slot.Load() < 0 {
		_, why := c.Connected()
		return 0, why
	}
	need, wait := m.Bytes, m.Wait
	f := c.free(d, need)
	d.mine.Add(need)
	counted := uint64(0) // of what the segment shows
	defer func() { d.mine.Add(counted - need) }()
	m.Slot, m.Keep = uint64(d.slot.Load()), f.left
	id, p, err := c.question(l, m)
	if err != nil {
		return 0, err.Error()
	}
	came := c.await(f, p, wait)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.asks, id)
	switch {
	case p.over.IsSet() && (p.bytes > 0 || !came):
	case p.over.IsSet():
		d.add(openAsk{bytes: need})
		return need, fmt.Sprintf("others had created what they were granted; %s", p.words)
	case came:
		note = fmt.Sprintf("the driver had %d bytes more for this process meanwhile", need)
		c.post(l, &protocol.Message{Kind: protocol.Done, ID: id, Slot: uint64(d.slot.Load())})
		d.add(openAsk{bytes: need})
		return need, note
	default:
		c.silent = time.Now().Add(silence)
		c.post(l, &protocol.Message{Kind: protocol.Done, ID: id, Slot: uint64(d.slot.Load())})
		return 0, fmt.Sprintf("the broker did not answer within %v", wait+grace)
	}
	if counted = p.bytes; counted > 0 {
		d.add(openAsk{id, l, p.bytes})
	}
	return p.bytes, p.words
}

// freed is what the driver had free when a question began, and how much more is needed.
type freed struct {
	c            *Client
	d            *device
	before, need uint64
	left         uint64 // free, and left to the grants of others
	unknown      bool
}

// free looks at what the driver has before a question. What is left to the grants of others is this process's when those are over:
// they may have created what they were granted before, and not have said so yet.
func (c *Client) free(d *device, need uint64) *freed {
	n, err := c.cfg.Host.Free(d.id)
	f := &freed{c: c, d: d, before: n, need: need, unknown: err != nil}
	if err == nil && !c.admit(d, min(n, need), d.mine.Load()) {
		f.before, f.left = 0, n
	}
	return f
}

// came reports whether the driver has what is needed for this process by now, beside what others were granted.
func (f *freed) came() bool {
	n, err := f.c.cfg.Host.Free(f.d.id)
	mine := f.d.mine.Load() // with what was asked for, of which the segment need not show anything
	return !f.unknown && err == nil && n >= f.before+f.need && f.c.admit(f.d, f.before+f.need, mine-min(mine, f.need))
}

// await waits for an answer, and reports whether the driver has what is needed for this process meanwhile: processes that end, or are
// not Cistern's, say nothing.
func (c *Client) await(f *freed, p *pending, wait time.Duration) (came bool) {
	const each = 50 * time.Millisecond
	limit := deadline.Deadline{Limit: wait + grace}
	for n := 0; ; n++ {
		rest := limit.Left(time.Now())
		if rest <= 0 {
			return false
		}
		if p.over.Wait(min(rest, each)) {
			return f.left > 0 && f.came()
		}
		if n >= 2 && f.came() {
			return true
		}
	}
}

func (d *device) add(o openAsk) {
	d.mu.Lock()
	d.open = append(d.open, o)
	d.mu.Unlock()
	if o.id != 0 {
		d.got.Add(o.bytes)
	}
}

// Done ends what Ask granted.
func (c *Client) Done(dev cuda.Device, granted uint64) {
	d := c.device(dev)
	if d == nil {
		return
	}
	d.mu.Lock()
	var o openAsk
	found := false
	for i := range d.open {
		if d.open[i].bytes == granted {
			o, found = d.open[i], true
			d.open = append(d.open[:i], d.open[i+1:]...)
			break
		}
	}
	d.mu.Unlock()
	if !found {
		return
	}
	if o.id == 0 { // no grant: the segment does not show it
		return
	}
	d.mine.Add(-o.bytes)
	d.got.Add(-o.bytes)
	if o.link == c.link.Load() {
		c.send(o.link, &protocol.Message{Kind: protocol.Done, ID: o.id, Slot: uint64(max(d.slot.Load(), 0))})
	}
}

// noHeadroom is how long nothing is released for headroom after other processes had nothing.
const noHeadroom = 100 * time.Millisecond

// Grown has other processes release what the driver lacks of its headroom: libraries load kernels when they are first called, and fail
// where the driver has no memory for them. Where they have nothing this process does. Memory in use stays, and the headroom is then
// smaller.
func (c *Client) Grown(dev cuda.Device) {
	d := c.device(dev)
	if d == nil || c.cfg.Headroom == nil || c.link.Load() == nil || d.slot.Load() < 0 {
		return
	}
	free, err := c.cfg.Host.Free(dev)
	keep := c.cfg.Headroom(d.total) + c.Others(dev)
	if err != nil || free >= keep || time.Now().UnixNano() < d.spared.Load() {
		return
	}
	if granted, _ := c.ask(dev, protocol.Message{Kind: protocol.Ask, Bytes: keep - free, Limit: protocol.OnlyUnused}); granted > 0 {
		c.Done(dev, granted)
		return
	}
	d.spared.Store(time.Now().Add(noHeadroom).UnixNano())
	_, _ = c.cfg.Host.GiveBack(dev, keep-free, 0)
}

// Available is what other processes would release for this one now, with the limit that the broker sets (0: none). known is false
// where no broker says so.
func (c *Client) Available(dev cuda.Device) (bytes, limit uint64, known bool) {
	l, d := c.link.Load(), c.device(dev)
	if l == nil || d == nil || d.slot.Load() < 0 {
		return 0, 0, false
	}
	id, p, err := c.question(l, protocol.Message{Kind: protocol.Query, Slot: uint64(d.slot.Load())})
	if err != nil {
		return 0, 0, false
	}
	p.over.Wait(grace)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.asks, id)
	if !p.over.IsSet() {
		c.silent = time.Now().Add(silence)
	}
	return p.bytes, p.limit, p.over.IsSet() && !p.lost
}

// Others is what of the device is granted to other processes.
func (c *Client) Others(dev cuda.Device) uint64 {
	l, d := c.link.Load(), c.device(dev)
	if l == nil || d == nil || d.slot.Load() < 0 || l.view.Load() == nil {
		return 0
	}
	granted, _ := l.view.Load().Granted(uint64(d.slot.Load()))
	return granted - min(granted, d.mine.Load())
}

// question sends a message that is answered.
func (c *Client) question(l *link, m protocol.Message) (uint64, *pending, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if left := time.Until(c.silent); left > 0 {
		return 0, nil, errors.New("not asked: the broker did not answer a moment ago")
	}
	if c.link.Load() != l {
		return 0, nil, errors.New(c.why)
	}
	c.last++
	m.ID = c.last
	p := &pending{}
	if err := c.post(l, &m); err != nil {
		return 0, nil, fmt.Errorf("the broker cannot be asked: %w", err)
	}
	c.asks[m.ID] = p
	return m.ID, p, nil
}

// send sends a message, which may be lost.
func (c *Client) send(l *link, m *protocol.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.post(l, m)
}

// post sends a message without waiting: the socket has room for hundreds, so one that is full is a broker that is stopped.
//
// +checklocks:c.mu
func (c *Client) post(l *link, m *protocol.Message, fds ...int) error {
	c.sent.Add(1)
	return l.post(m.Append(nil), fds)
}

// give answers the broker's requests.
func (c *Client) give() {
	defer c.panicked()
	for m := range c.gives {
		l := c.link.Load()
		dev, ok := c.bySlot(m.Slot)
		if l == nil || !ok {
			continue
		}
		if m.Kind == protocol.Joined {
			c.Declare(dev)
			continue
		}
		answer := protocol.Message{Kind: protocol.Gave, ID: m.ID, Slot: m.Slot}
		answer.Status, _ = c.cfg.Host.Status(dev)
		if m.Bytes == 0 {
			c.Declare(dev) // the memory in question may have grown
		} else {
			var err error
			if answer.Bytes, err = c.cfg.Host.GiveBack(dev, m.Bytes, max(m.Keep, answer.Status.Floor(m.Hold))); err != nil {
				answer.Text = err.Error()
			}
			answer.Status, _ = c.cfg.Host.Status(dev)
		}
		c.send(l, &answer)
	}
}

// panicked ends a goroutine that panicked.
func (c *Client) panicked() {
	if v := recover(); v != nil {
		c.ended.Set()
		c.lose("a bug in Cistern")
		c.cfg.Host.Panicked(v)
	}
}

func (c *Client) bySlot(slot uint64) (cuda.Device, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, d := range c.devices {
		if s := d.slot.Load(); s >= 0 && uint64(s) == slot {
			return id, true
		}
	}
	return 0, false
}

// refused is that the broker ended the connection, with words.
type refused string

func (r refused) Error() string { return "the broker refused: " + string(r) }

// gone says why a socket has no broker.
func gone(path string, err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return errors.New("no broker is connected")
	}
	return fmt.Errorf("no broker is connected: %s: %w", path, err)
}
