package node_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/node"
)

// entryOf is what the broker lists of the client with a label, when it says what is expected.
func entryOf(t *testing.T, op *control.Conn, label string, pausable uint64) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		all, err := op.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range all {
			if e.Label == label && e.Pausable == pausable {
				return
			}
		}
		if time.Now().After(end) {
			t.Fatalf("%+v: expected %d bytes of %s that may be paused", all, pausable, label)
		}
	}
}

// TestAutoPause: a request of one process is met by memory that another one uses, if its owner lets the broker pause it; the contents
// are there when the owner has it again.
func TestAutoPause(t *testing.T) {
	socket, gpu := serving(t)
	p := start(t, gpu, cistern.Options{Node: socket, NodeLabel: "trainer", NodeWait: 100 * time.Millisecond})
	other := start(t, gpu, cistern.Options{Node: socket, NodeLabel: "engine", NodeWait: 30 * time.Second})
	impatient := start(t, gpu, cistern.Options{Node: socket, NodeLabel: "impatient", NodeWait: -1}) // does not wait
	n, err := node.Connect(p.a)
	must(t, err)
	defer n.Close()
	for _, x := range []program{other, impatient} {
		n, err := node.Connect(x.a)
		must(t, err)
		defer n.Close()
	}
	op, err := control.Dial(socket)
	must(t, err)
	defer op.Close()
	a, err := p.d.Alloc(100*mib, p.st)
	must(t, err)
	contents := []string{"weights at the beginning", "and at the end"}
	ends := []cuda.Ptr{a, a + 100*mib - 64}
	for i, at := range ends {
		p.write(t, at, contents[i])
	}
	paused := func() uint64 { return uint64(p.d.Stats().Paused.All.Current) }
	fails := func(when string) {
		t.Helper()
		var oom *cistern.OutOfMemoryError
		if _, err := impatient.d.Alloc(1000*mib, impatient.st); !errors.As(err, &oom) || paused() != 0 {
			t.Fatalf("%s: %v, %d paused", when, err, paused())
		}
	}
	// A consent to commands alone does not let the broker pause.
	must(t, n.AllowPause(0, cistern.Selection{}, cistern.PauseOptions{}))
	entryOf(t, op, "trainer", 0)
	fails("by command only")
	must(t, n.DenyPause(0))

	must(t, n.AllowAutoPause(0, cistern.Selection{}, cistern.PauseOptions{}))
	entryOf(t, op, "trainer", 100*mib)
	pool, err := p.d.NewPool(cistern.PoolID{1, 1})
	must(t, err)
	must(t, p.d.BeginCapture(p.st, pool))
	fails("while a stream is being captured")
	must(t, p.d.EndCapture(p.st))
	time.Sleep(time.Second) // a client that could not pause is left alone for so long

	b, err := other.d.Alloc(1000*mib, other.st)
	if err != nil {
		var oom *cistern.OutOfMemoryError
		errors.As(err, &oom)
		t.Fatalf("%v: %+v", err, oom)
	}
	if paused() != 100*mib || other.d.Stats().Counters.ByNode != 1 {
		t.Errorf("%d paused, %+v", paused(), other.d.Stats().Counters)
	}
	entryOf(t, op, "trainer", 0)
	other.write(t, b, "another process's contents")
	var oom *cistern.OutOfMemoryError
	if err := n.DenyPause(0); !errors.As(err, &oom) || paused() != 100*mib {
		t.Error("the other process uses the memory: ", err, paused())
	}
	must(t, other.a.Free(b)) // what it caches from now on goes to the owner, by the broker
	for end := time.Now().Add(time.Minute); paused() != 0; {
		if err := n.DenyPause(0); err != nil && !errors.As(err, &oom) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
	for i, at := range ends {
		if got := p.read(t, at, len(contents[i])); got != contents[i] {
			t.Errorf("%q after the resume, want %q", got, contents[i])
		}
	}
	fails("after the consent has ended")
}

// TestAutoPauseOfAPool: what is not selected stays, and memory that is allocated under the consent counts.
func TestAutoPauseOfAPool(t *testing.T) {
	socket, gpu := serving(t)
	p := start(t, gpu, cistern.Options{Node: socket, NodeLabel: "owner"})
	n, err := node.Connect(p.a)
	must(t, err)
	defer n.Close()
	op, err := control.Dial(socket)
	must(t, err)
	defer op.Close()
	pool, err := p.d.NewPool(cistern.PoolID{1, 2})
	must(t, err)
	_, err = p.d.Alloc(300*mib, p.st)
	must(t, err)
	must(t, n.AllowAutoPause(0, cistern.Selection{Pool: pool}, cistern.PauseOptions{Keep: cistern.KeepNone}))
	_, err = pool.Alloc(500*mib, p.st)
	must(t, err)
	other := start(t, gpu, cistern.Options{Node: socket, NodeWait: 30 * time.Second})
	m, err := node.Connect(other.a)
	must(t, err)
	defer m.Close()
	eventually(t, "the owner has joined", func() bool { // what it says is as old as its consent, and asked for when memory is lacking
		all, err := op.List()
		return err == nil && slices.ContainsFunc(all, func(e protocol.Entry) bool { return e.Label == "owner" })
	})
	_, err = other.d.Alloc(600*mib, other.st)
	must(t, err)
	if got := p.d.Stats().Paused.All.Current; got != 500*mib {
		t.Errorf("%d paused", got)
	}
	if got := p.d.Pausable(cistern.Selection{}, cistern.PauseOptions{}); got != 300*mib {
		t.Errorf("%d may be paused", got)
	}
}
