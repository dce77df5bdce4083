package broker_test

import (
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// owner is a member that lets the broker pause memory in use.
type owner struct {
	*member
	omu     sync.Mutex
	allowed uint64
	refuses error
	pauses  int
}

var errDenied = errors.New("it is not allowed now")

func (o *owner) Pausable(cuda.Device) uint64 {
	o.omu.Lock()
	defer o.omu.Unlock()
	return o.allowed
}

func (o *owner) PauseForOthers(cuda.Device) (uint64, error) {
	o.omu.Lock()
	defer o.omu.Unlock()
	if o.allowed == 0 {
		return 0, errDenied
	}
	if o.refuses != nil {
		return 0, o.refuses
	}
	o.pauses++
	n := o.allowed
	o.allowed = 0
	o.mu.Lock()
	reserved, active := o.reserved, o.active
	o.mu.Unlock()
	o.has(reserved-n, active-n)
	return n, nil
}

func (o *owner) Pause(cuda.Device) (uint64, error)  { return 0, errDenied }
func (o *owner) Resume(cuda.Device) (uint64, error) { return 0, nil }
func (o *owner) NoConsent(err error) bool           { return err == errDenied }

// allow is what the program lets the broker pause from now on.
func (o *owner) allow(bytes uint64) {
	o.omu.Lock()
	o.allowed = bytes
	o.omu.Unlock()
	o.c.Declare(0)
}

func (o *owner) paused() int {
	o.omu.Lock()
	defer o.omu.Unlock()
	return o.pauses
}

// owner joins one.
func (n *node) owner(t *testing.T, label string) *owner {
	t.Helper()
	o := &owner{member: &member{t: t, gpu: n.gpu}}
	page := sync.OnceValues(func() (*live.Page, error) { return live.PublishUnlisted(live.Process{}, o.gauges) })
	o.c = client.New(client.Config{Socket: n.socket, Label: label, Version: "1", Host: o, Page: page})
	o.c.Join(0, n.gpu.uuid, n.gpu.total)
	t.Cleanup(func() {
		o.c.Close()
		if p, err := page(); err == nil {
			p.Close()
		}
	})
	eventually(t, "it has joined", func() bool {
		_, _, known := o.c.Available(0)
		return known
	})
	return o
}

// Memory in use that its owner lets the broker pause meets a request that the unused memory of all does not.
func TestAutoPause(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	asker, cached, o := n.member(t, "asker"), n.member(t, "cached"), n.owner(t, "owner")
	o.has(6*gib, 6*gib)
	o.allow(6 * gib)
	n.unused(cached, asker, 4*gib)
	if ok, note := asker.grow(3*gib, 10*time.Second); !ok || o.paused() != 0 {
		t.Fatal("the cache of others suffices: ", ok, o.paused(), note)
	}
	cached.has(0, 0)
	asker.has(4*gib, 4*gib)
	eventually(t, "there is no cache", func() bool { return n.entry("cached").Reserved == 0 })
	asker.c.Grown(0) // nothing is paused for what the driver is to keep free
	if o.paused() != 0 {
		t.Error("a pause for headroom")
	}
	ok, note := asker.grow(4*gib, 10*time.Second)
	if !ok || o.paused() != 1 || !strings.Contains(note, "paused, which released") {
		t.Fatal(ok, o.paused(), note)
	}
	eventually(t, "it is paused", func() bool {
		e := n.entry("owner")
		return e.Pauses == 1 && e.Pausable == 0 && e.Gave == 6*gib
	})
	d := n.b.Devices()[0]
	if d.Pauses != 1 || d.Granted != 0 || d.Given < 6*gib {
		t.Errorf("%+v", d)
	}
	o.has(1*gib, 1*gib)
	o.allow(gib)
	eventually(t, "that is said", func() bool { return n.entry("owner").Pausable == gib && n.b.Devices()[0].Pausable == gib })
	o.allow(0)
	eventually(t, "its end is said", func() bool { return n.entry("owner").Pausable == 0 })
}

// A broker that begins while a consent stands is sent it, as is one that asks when more is allowed than the client declared.
func TestAutoPauseOfNewBroker(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	o := n.owner(t, "owner")
	o.has(6*gib, 6*gib)
	o.allow(2 * gib)
	n.stop()
	n.start()
	eventually(t, "it is said to the new broker", func() bool {
		all := n.entries()
		return len(all) == 1 && all[0].Pausable == 2*gib
	})
	o.omu.Lock()
	o.allowed = 6 * gib // the program allocates more under the consent
	o.omu.Unlock()
	asker := n.member(t, "asker")
	asker.has(4*gib, 4*gib)
	if ok, note := asker.grow(5*gib, 10*time.Second); !ok {
		t.Error(note)
	}
}

// A client that cannot pause now, does not answer, or does not allow it any more leaves the request to others.
func TestAutoPauseFails(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	asker, o := n.member(t, "asker"), n.owner(t, "owner")
	asker.has(2*gib, 2*gib)
	o.has(8*gib, 8*gib)
	o.refuses = errors.New("a stream is being captured")
	o.allow(8 * gib)
	granted, note := asker.c.Ask(0, gib, 0)
	if granted != 0 || !strings.Contains(note, "being captured") {
		t.Error(granted, note)
	}
	o.omu.Lock()
	o.allowed, o.refuses = 0, nil // the consent ends, and the broker has not been told
	o.omu.Unlock()
	time.Sleep(time.Second) // until it may be asked again
	if granted, _ = asker.c.Ask(0, gib, 0); granted != 0 || o.paused() != 0 {
		t.Error(granted, o.paused())
	}
	eventually(t, "nothing can be paused", func() bool { return n.entry("owner").Pausable == 0 })
}

// silent is a client that lets the broker pause, and does not answer.
func silent(t *testing.T, n *node) (conn *net.UnixConn, asked chan protocol.Message) {
	t.Helper()
	var cached atomic.Uint64
	conn, asked = friendWith(t, n, &cached), make(chan protocol.Message, 100)
	for _, m := range []protocol.Message{{Kind: protocol.Join, ID: 1, UUID: n.gpu.uuid, Total: n.gpu.total}, {Kind: protocol.Pausable, Bytes: gib}} {
		if _, err := conn.Write(m.Append(nil)); err != nil {
			t.Fatal(err)
		}
	}
	go func() {
		b := make([]byte, protocol.MaxMessage)
		for {
			k, err := conn.Read(b)
			if err != nil || k == 0 {
				return
			}
			switch m, _ := protocol.Parse(b[:k]); m.Kind {
			case protocol.GiveBack:
				_, _ = conn.Write((&protocol.Message{Kind: protocol.Gave, ID: m.ID, Slot: m.Slot, Status: protocol.Status{Reserved: gib, Active: gib}}).Append(nil))
			case protocol.Pausing:
				asked <- m
			}
		}
	}()
	return conn, asked
}

// A client that does not pause in time is not waited for a second time.
func TestAutoPauseUnanswered(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	asker := n.member(t, "asker")
	conn, asked := silent(t, n)
	entry := func() protocol.Entry {
		all := slices.DeleteFunc(n.entries(), func(e protocol.Entry) bool { return e.Label == "asker" })
		if len(all) != 1 {
			return protocol.Entry{}
		}
		return all[0]
	}
	eventually(t, "it can be paused", func() bool { return entry().Pausable == gib })
	granted, note := asker.c.Ask(0, gib, 100*time.Millisecond)
	if granted != 0 || !strings.Contains(note, "did not answer within") || len(asked) != 1 {
		t.Fatal(granted, note, len(asked))
	}
	m := <-asked
	if m.Keep != protocol.PauseForOthers {
		t.Errorf("%+v", m)
	}
	if e := entry(); e.Skipped || e.Pausable != 0 || e.Missed != 1 {
		t.Errorf("%+v", e)
	}
	if granted, note = asker.c.Ask(0, gib, 0); granted != 0 || len(asked) != 0 {
		t.Error(granted, note, len(asked))
	}
	// It has paused after all: that is free for all now, and no grant's. It may say so, and be paused again.
	for _, x := range []protocol.Message{{Kind: protocol.Paused, ID: m.ID, Bytes: gib, Status: protocol.Status{Paused: gib}}, {Kind: protocol.Pausable, Bytes: 7}} {
		if _, err := conn.Write(x.Append(nil)); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "that is read", func() bool { return entry().Pausable == 7 })
	if e, d := entry(), n.b.Devices()[0]; e.Gave != 0 || d.Granted != 0 {
		t.Errorf("%+v, %+v", e, d)
	}
}

// A request does not fail because another client has created what it was granted and has not said so yet.
func TestGrantThatWasCreated(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ inUse, need uint64 }{"others have less": {0, 6 * gib}, "others have as much": {4 * gib, 2 * gib}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, broker.Options{}, 10*gib)
			first, victim, busy, second := n.member(t, "first"), n.member(t, "victim"), n.member(t, "busy"), n.member(t, "second")
			busy.has(c.inUse, c.inUse)
			n.unused(victim, first, 4*gib)
			granted, note := first.c.Ask(0, 4*gib, time.Second)
			if granted != 4*gib {
				t.Fatal(granted, note)
			}
			first.has(4*gib, 4*gib)
			over := make(chan string, 1)
			go func() {
				ok, note := second.grow(c.need, 30*time.Second)
				if ok {
					note = ""
				}
				over <- note
			}()
			eventually(t, "the other client asks", func() bool { return n.b.Devices()[0].Waiting == 1 })
			first.c.Done(0, granted)
			began := time.Now()
			if note := <-over; note != "" {
				t.Error(note)
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("it waited %v", took)
			}
		})
	}
}
