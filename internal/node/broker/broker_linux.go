package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/grants"
	"github.com/cistern-gpu/cistern/internal/node/ledger"
	"github.com/cistern-gpu/cistern/internal/node/policy"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// Options configure a broker.
type Options struct {
	Policy     string        // the file with the rules; "" is none
	DryRun     bool          // decisions are logged, and no client is asked
	Log        *slog.Logger  // default slog.Default
	Answer     time.Duration // how long a victim has for its answer; default 500 ms
	MaxClients int           // default 4096
	PerProcess int           // connections of one process; default 4
	PerUser    int           // connections of one user, but root and the broker's own; default a quarter of MaxClients
	Observer   Observer      // nil: none
	Objects    ObjectOptions
}

const (
	// GrantLasts is how long a grant stands whose asker does not end it.
	GrantLasts = 2 * time.Second
	// greetTime is how long a connection may take for its first message.
	greetTime = 5 * time.Second
	// sendTime is how long a client may take to accept a message. Its socket has room for hundreds.
	sendTime = 100 * time.Millisecond
	// mostWait bounds the wait that a question may name.
	mostWait = time.Minute
	// overtime is how long after its wait a question is answered at the latest: its asker then takes the broker for stopped soon.
	overtime = 500 * time.Millisecond
	// freshFor is how long statuses that were read are taken for what is: their segments are written four times a second.
	freshFor = 10 * time.Millisecond
	// again is how often a waiting question is decided anew.
	again = 50 * time.Millisecond
	// sweepEvery is how often processes are looked for that ended and whose connections others keep open.
	sweepEvery = 5 * time.Second
	// endTime is how long the broker's end waits for its connections to end.
	endTime = 5 * time.Second
	// operators is how many connections of root and the broker's user there may be beyond MaxClients, refusals how many that are
	// refused and not closed yet. Where there are as many, as closing them waits, others wait to be accepted.
	operators = 64
	refusals  = 256
)

// Broker is the daemon.
type Broker struct {
	opt     Options
	log     *slog.Logger
	began   time.Time
	segment *grants.Segment
	served  sync.WaitGroup
	places  chan struct{} // of connections that are not closed yet
	left    atomic.Bool   // connections did not end with Serve
	handed  atomic.Bool   // a successor has all
	counts  Counts
	objects *objectTable
	notes   *notes

	inquiries [grants.Slots]inquiries

	mu      sync.Mutex
	ledger  *ledger.Ledger              // +checklocks:mu
	rules   *policy.Policy              // in force: the file's, then those of commands; +checklocks:mu
	file    *policy.Policy              // +checklocks:mu
	extra   []policy.Rule               // of commands; +checklocks:mu
	clients map[ledger.ClientID]*client // +checklocks:mu
	slots   map[[16]byte]ledger.Slot    // +checklocks:mu
	uuids   [grants.Slots][16]byte      // +checklocks:mu
	open    map[uint64]*question        // +checklocks:mu
	last    uint64                      // +checklocks:mu
	conns   map[int]int                 // by process; +checklocks:mu
	users   map[uint32]int              // connections by user; +checklocks:mu
	shown   [grants.Slots]uint64        // +checklocks:mu
	fresh   [grants.Slots]time.Duration // when the statuses of a device were read; +checklocks:mu
	expiry  map[uint64]*time.Timer      // +checklocks:mu
	closing bool                        // +checklocks:mu
	stops   map[*client]struct{}        // those that are connected; +checklocks:mu
	passes  passes                      // +checklocks:mu
}

// Counts are what a broker did.
type Counts struct {
	Messages atomic.Uint64 // that came
	Asks     atomic.Uint64
	Given    atomic.Uint64 // bytes that victims released
	Skipped  atomic.Uint64 // victims that did not answer
	Refused  atomic.Uint64 // connections
	loads    loads         // by device
}

// New makes a broker, and reads its policy.
func New(opt Options) (*Broker, error) {
	if opt.Log == nil {
		opt.Log = slog.Default()
	}
	if opt.Answer == 0 {
		opt.Answer = 500 * time.Millisecond
	}
	if opt.MaxClients == 0 {
		opt.MaxClients = 4096
	}
	if opt.PerProcess == 0 {
		opt.PerProcess = 4
	}
	if opt.PerUser == 0 {
		opt.PerUser = max(opt.MaxClients/4, 1)
	}
	rules, err := readPolicy(opt.Policy)
	if err != nil {
		return nil, err
	}
	segment, err := grants.New()
	if err != nil {
		return nil, err
	}
	b := &Broker{opt: opt, log: opt.Log, began: time.Now(), segment: segment, ledger: ledger.New(), rules: rules, file: rules,
		clients: map[ledger.ClientID]*client{}, slots: map[[16]byte]ledger.Slot{}, open: map[uint64]*question{}, conns: map[int]int{},
		users: map[uint32]int{}, expiry: map[uint64]*time.Timer{}, stops: map[*client]struct{}{}, notes: newNotes(opt.Log),
		places: make(chan struct{}, opt.MaxClients+operators+refusals)}
	b.objects = newObjectTable(b, opt.Objects)
	return b, nil
}

func readPolicy(path string) (*policy.Policy, error) {
	if path == "" {
		return &policy.Policy{}, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	defer f.Close()
	p, err := policy.Parse(f)
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", path, err)
	}
	return p, nil
}

// Counts are the broker's counts.
func (b *Broker) Counts() *Counts { return &b.counts }

// now is the ledger's time.
func (b *Broker) now() time.Duration { return time.Since(b.began) }

// Serve answers connections until the context ends, then hangs up all clients and waits for endTime at most.
func (b *Broker) Serve(ctx context.Context, l *net.UnixListener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	b.mu.Lock()
	b.passes.listener, b.passes.end = l, cancel
	b.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	b.served.Go(func() { b.sweep(ctx) })
	b.served.Go(func() { b.decay(ctx) })
	defer b.finish()
	defer cancel()
	for {
		select {
		case b.places <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		c, err := l.AcceptUnix()
		if err != nil {
			<-b.places
		}
		switch {
		case ctx.Err() != nil:
			if err == nil {
				c.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("the listening socket was closed: %w", err)
		case err != nil: // no descriptors left: clients wait in line
			b.notes.say(slog.LevelWarn, uint32(os.Geteuid()), "cannot accept a connection", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(again):
			}
			continue
		}
		b.served.Go(func() {
			defer func() { <-b.places }()
			b.serve(ctx, c)
		})
	}
}

// finish hangs up all connections, and those that come.
func (b *Broker) finish() {
	b.mu.Lock()
	b.closing = true
	all := slices.Collect(maps.Keys(b.stops))
	b.mu.Unlock()
	for _, c := range all {
		c.hangUp()
	}
	over := make(chan struct{})
	go func() {
		b.served.Wait()
		close(over)
	}()
	select {
	case <-over:
	case <-time.After(endTime):
		b.left.Store(true)
		b.log.Warn("connections did not end: closing descriptors that clients sent waits", "connections", len(b.places))
	}
}

// Close releases what a broker that no longer serves has. Connections that did not end may still use its segment.
func (b *Broker) Close() {
	b.objects.close()
	if !b.left.Load() {
		b.segment.Close()
	}
}

// Alive reports whether the broker answers, for a watchdog: it takes the lock that each decision needs.
func (b *Broker) Alive() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.closing
}

// Reload reads the policy's file again. After an error the rules are those of before.
func (b *Broker) Reload() error {
	rules, err := readPolicy(b.opt.Policy)
	if err != nil {
		return err
	}
	b.setRules(func() *policy.Policy {
		b.file = rules
		return rules.With(b.extra)
	})
	b.log.Info("policy read", "file", b.opt.Policy, "rules", rules.Len())
	return nil
}

// setRules puts rules into force, and tells clients whose max is another. decide is called with mu: others may change rules too.
func (b *Broker) setRules(decide func() *policy.Policy) {
	type change struct {
		c    *client
		slot ledger.Slot
		max  uint64
	}
	var changes []change
	b.mu.Lock()
	b.rules = decide()
	for id, c := range b.clients {
		for _, slot := range c.slots {
			before, _ := b.ledger.Account(id, slot)
			p := b.policyOf(c, slot)
			b.ledger.SetPolicy(id, slot, p)
			if p.Max != before.Policy.Max {
				changes = append(changes, change{c, slot, p.Max})
			}
		}
	}
	b.mu.Unlock()
	for _, x := range changes {
		x.c.limit(x.slot, x.max)
	}
}

// limit tells the client its max on a device, and again where rules have changed meanwhile. So whatever else tells it, the last it
// hears is what is in force: each that tells looks again afterwards.
func (c *client) limit(slot ledger.Slot, now uint64) {
	for {
		if !c.send(protocol.Message{Kind: protocol.Limit, Slot: uint64(slot), Limit: now}) {
			return
		}
		said := now
		if now = c.max(slot); now == said {
			return
		}
	}
}

// max is that of the rules in force.
func (c *client) max(slot ledger.Slot) uint64 {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	a, _ := c.b.ledger.Account(c.id, slot)
	return a.Policy.Max
}

// policyOf is what the rules say of a client on a device.
//
// +checklocks:b.mu
func (b *Broker) policyOf(c *client, slot ledger.Slot) ledger.Policy {
	return b.rules.Of(policy.Client{UID: c.uid, Cgroup: c.cgroup, Label: c.label, Name: c.name, Device: UUID(b.uuids[slot])})
}

// UUID writes a device's UUID as nvidia-smi does.
func UUID(u [16]byte) string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// show writes what is granted of a device to the shared segment.
//
// +checklocks:b.mu
func (b *Broker) show(slot ledger.Slot) {
	granted, released := b.ledger.Granted(slot)
	if granted != 0 || b.shown[slot] != 0 {
		b.segment.Set(uint64(slot), granted, released, GrantLasts+time.Second)
	}
	b.shown[slot] = granted
}

// sweep drops clients whose process has ended.
func (b *Broker) sweep(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(sweepEvery):
		}
		b.objects.expire()
		b.mu.Lock()
		all := make([]*client, 0, len(b.clients))
		for _, c := range b.clients {
			all = append(all, c)
		}
		b.mu.Unlock()
		for _, c := range ended(b.objects.connected(all)) {
			b.notes.say(slog.LevelInfo, c.uid, "a client's process has ended, and another has its connection open", "client", c.id, "pid", c.pid)
			c.hangUp()
		}
		b.notes.tell(time.Now())
	}
}

// one makes one line of words.
func one(words ...string) string { return strings.Join(words, "; ") }
