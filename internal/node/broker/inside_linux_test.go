package broker

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"testing"
)

func newBroker(t *testing.T) *Broker {
	t.Helper()
	b, err := New(Options{Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// Rules that operators set at the same time are all in force.
func TestRulesAtOnce(t *testing.T) {
	b := newBroker(t)
	const operators, each = 4, 500
	var all sync.WaitGroup
	for i := range operators {
		all.Go(func() {
			c := &client{b: b, process: process{uid: uint32(os.Geteuid())}}
			for k := range each {
				if err := b.set(c, fmt.Sprintf("label=%d weight=%d", i, k+1)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := b.rules.Len(); n != operators*each {
		t.Errorf("%d rules in force, expected %d", n, operators*each)
	}
}

// A process of a PID namespace that the broker does not see has the number 0. It is neither the broker nor all others like it.
func TestUnknownProcess(t *testing.T) {
	p := process{pidfd: -1}
	p.look()
	if p.start != 0 || p.name != "" || p.cgroup != "" {
		t.Errorf("%+v", p)
	}
	b := newBroker(t)
	for i := range 3 * b.opt.PerProcess {
		if err := b.admit(&client{b: b, conn: &net.UnixConn{}, process: p}); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	known := &client{b: b, conn: &net.UnixConn{}, process: process{pid: 7}}
	for range b.opt.PerProcess {
		if err := b.admit(known); err != nil {
			t.Fatal(err)
		}
	}
	if b.admit(known) == nil {
		t.Error("a process has one connection more than it may")
	}
}
