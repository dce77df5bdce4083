package broker

import (
	"fmt"
	"io"
	"log/slog"
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
