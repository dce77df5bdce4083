package broker

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/grants"
	"github.com/cistern-gpu/cistern/internal/node/ledger"
	"github.com/cistern-gpu/cistern/internal/node/policy"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// others are users that neither are root nor the broker's.
func others() (a, b uint32) {
	a = uint32(os.Geteuid()) + 1
	return a, a + 1
}

// of is a connection of a process of a user.
func of(b *Broker, uid uint32, pid int) *client {
	return &client{b: b, conn: &net.UnixConn{}, process: process{uid: uid, pid: pid, pidfd: -1}}
}

// One user's connections leave places for other users, and those of all users leave places for operators.
func TestConnectionsOfOneUser(t *testing.T) {
	b := newBroker(t)
	alice, bob := others()
	var open []*client
	for pid := 1; ; pid++ {
		c := of(b, alice, pid)
		err := b.admit(c)
		if err != nil {
			if want := fmt.Sprintf("user %d has %d connections already", alice, b.opt.MaxClients/4); err.Error() != want {
				t.Errorf("%v, want %s", err, want)
			}
			break
		}
		open = append(open, c)
	}
	if len(open) != b.opt.MaxClients/4 {
		t.Errorf("one user has %d connections", len(open))
	}
	if err := b.admit(of(b, bob, 1<<20)); err != nil {
		t.Error(err)
	}
	b.release(open[0])
	if err := b.admit(open[0]); err != nil {
		t.Errorf("the place of one that ended: %v", err)
	}
	b.opt.PerUser = b.opt.MaxClients // as if many users did so
	for pid := 1 << 21; b.admit(of(b, bob, pid)) == nil; pid++ {
	}
	if n := len(b.stops); n != b.opt.MaxClients {
		t.Errorf("%d connections", n)
	}
	for pid := range operators {
		if err := b.admit(of(b, 0, 1<<22+pid)); err != nil {
			t.Fatalf("an operator's connection %d: %v", pid, err)
		}
	}
	if b.admit(of(b, 0, 1<<23)) == nil {
		t.Error("there is no bound for operators")
	}
}

// A user that invents devices leaves room for those of other users, and for itself once they are gone.
func TestDevicesOfOneUser(t *testing.T) {
	b := newBroker(t)
	alice, bob := others()
	invented := byte(0)
	joins := func(uid uint32) (c *client, n int, err error) {
		ends := pair(t)
		t.Cleanup(func() { ends[0].Close(); ends[1].Close() })
		c = &client{b: b, conn: ends[0], heard: map[ledger.Slot]time.Time{}, process: process{uid: uid, pidfd: -1}}
		b.enter(c)
		for ; ; n++ {
			invented++
			if err = c.join(protocol.Message{Kind: protocol.Join, ID: 1, UUID: [16]byte{uint8(uid), invented}, Total: 1}); err != nil {
				return c, n, err
			}
		}
	}
	first, n, err := joins(alice)
	if want := fmt.Sprintf("user %d uses 64 devices already, and 64 places are left", alice); n != 64 || err.Error() != want {
		t.Errorf("%d devices, %v", n, err)
	}
	if _, n, err := joins(bob); n != 32 {
		t.Errorf("%d devices of another user: %v", n, err)
	}
	b.leave(first)
	if _, n, err := joins(alice); n != 48 {
		t.Errorf("%d devices when the others are gone: %v", n, err)
	}
	if _, n, err := joins(0); n != grants.Slots-32-48 || !strings.Contains(err.Error(), "there are 128 devices already") {
		t.Errorf("%d devices of root: %v", n, err)
	}
}

// Lines that clients of a user cause are limited, and the next one says how many were left out. Those of another user are written.
func TestLogIsLimited(t *testing.T) {
	var out bytes.Buffer
	n := newNotes(slog.New(slog.NewTextHandler(&out, nil)))
	now := time.Now()
	for range 1000 {
		n.sayAt(now, slog.LevelWarn, 7, "refused")
		n.sayAt(now, slog.LevelDebug, 7, "detail")
	}
	n.sayAt(now, slog.LevelWarn, 8, "other")
	if got := out.String(); strings.Count(got, "refused") != noteBurst || strings.Count(got, "other") != 1 || strings.Contains(got, "detail") {
		t.Errorf("%d lines of %d", strings.Count(got, "refused"), noteBurst)
	}
	out.Reset()
	now = now.Add(noteEvery)
	n.sayAt(now, slog.LevelWarn, 7, "refused")
	n.sayAt(now, slog.LevelWarn, 7, "refused")
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, fmt.Sprintf("left_out=%d", 1000-noteBurst)) {
		t.Error(got)
	}
	out.Reset()
	now = now.Add(noteEvery)
	n.tell(now)
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "uid=7 left_out=1") {
		t.Error(got)
	}
	out.Reset()
	for uid := range uint32(10_000) { // of as many users as there may be
		n.sayAt(now, slog.LevelWarn, uid, "refused")
	}
	if k := strings.Count(out.String(), "\n"); k > allBurst || len(n.users) > mostNoted {
		t.Errorf("%d lines, %d users", k, len(n.users))
	}
	n.tell(now.Add(time.Hour))
	n.tell(now.Add(2 * time.Hour))
	if len(n.users) > mostNoted-allBurst {
		t.Errorf("%d users are kept", len(n.users))
	}
}

// blocked is a log whose reader reads nothing until it is told to.
type blocked struct{ wait, came chan struct{} }

func (w *blocked) Write(b []byte) (int, error) {
	select {
	case w.came <- struct{}{}:
	default:
	}
	<-w.wait
	return len(b), nil
}

// A log that cannot be written does not keep the broker's lock.
func TestLogThatWaits(t *testing.T) {
	w := &blocked{make(chan struct{}), make(chan struct{}, 1)}
	b, err := New(Options{Log: slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	part := ledger.Part{Grant: 1, Bytes: 1}
	for name, do := range map[string]func(c *client){
		"comes":           b.enter,
		"goes":            func(c *client) { b.leave(c) },
		"answers again":   func(c *client) { _ = c.handle(t.Context(), protocol.Message{Kind: protocol.Done}, nil) },
		"does not answer": func(c *client) { b.miss(b.openOf(c, part)) },
		"gives":           func(c *client) { b.gave(c, protocol.Message{ID: b.openOf(c, part).id, Text: "x"}) },
	} {
		c := of(b, 0, 1)
		c.heard, c.slots = map[ledger.Slot]time.Time{}, []ledger.Slot{0}
		b.mu.Lock()
		b.last++
		c.id = ledger.ClientID(b.last)
		b.clients[c.id] = c
		b.ledger.Join(0, c.id, 0, 1, ledger.Policy{})
		b.ledger.Missed(ledger.Part{Client: c.id}) // so that it is mute
		b.mu.Unlock()
		over := make(chan struct{})
		go func() {
			do(c)
			close(over)
		}()
		<-w.came
		if !b.Alive() {
			t.Error(name)
		}
		w.wait <- struct{}{}
		<-over
	}
}

// openOf is a question to a client that is open.
func (b *Broker) openOf(c *client, p ledger.Part) *question {
	b.mu.Lock()
	defer b.mu.Unlock()
	p.Client = c.id
	return b.put([]ledger.Part{p})[0]
}

// Rules that change at the same time leave a client with the limit that is in force, whichever message was sent first.
func TestLimitsAtOnce(t *testing.T) {
	b := newBroker(t)
	buf := make([]byte, protocol.MaxMessage)
	for i := range 500 {
		ends := pair(t)
		c := &client{b: b, conn: ends[0], heard: map[ledger.Slot]time.Time{}, process: process{pidfd: -1}}
		b.enter(c)
		if err := c.join(protocol.Message{Kind: protocol.Join, ID: 1, UUID: [16]byte{1}, Total: 1 << 30}); err != nil {
			t.Fatal(err)
		}
		var both sync.WaitGroup
		for k := range 2 {
			rule, err := policy.ParseRule(fmt.Sprintf("max=%d", 2*i+k+1))
			if err != nil {
				t.Fatal(err)
			}
			both.Go(func() { b.setRules(func() *policy.Policy { return new(policy.Policy).With([]policy.Rule{rule}) }) })
		}
		both.Wait()
		want := c.max(0)
		b.leave(c)
		ends[0].Close()
		got := uint64(0)
		for {
			n, err := ends[1].Read(buf)
			if n == 0 || err != nil {
				break
			}
			m, err := protocol.Parse(buf[:n])
			if err != nil {
				t.Fatal(err)
			}
			got = m.Limit
		}
		ends[1].Close()
		if got != want {
			t.Fatalf("round %d: the client has the limit %d, and %d is in force", i, got, want)
		}
	}
}
