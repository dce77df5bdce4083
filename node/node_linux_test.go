package node_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda/open"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/node"
)

const mib = 1 << 20

// program is an allocator on a device of 1 GiB that it shares.
type program struct {
	a  *cistern.Allocator
	d  cistern.Device
	st cistern.Stream
}

func start(t *testing.T, gpu string, o cistern.Options) program {
	t.Helper()
	drv, err := open.Open("sim:1GiB@" + gpu)
	if err != nil {
		t.Fatal(err)
	}
	var p program
	if p.a, err = cistern.New(drv, o); err == nil {
		p.d, err = p.a.Device(0)
	}
	if err == nil {
		p.st, err = p.d.Stream(0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// serving is the socket of a broker that runs until the test ends, and the file of a device of 1 GiB.
func serving(t *testing.T) (socket, gpu string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") // a socket's path has to be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	gpu, socket = filepath.Join(dir, "gpu"), filepath.Join(dir, "s")
	b, err := broker.New(broker.Options{Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error)
	go func() { over <- b.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-over; err != nil {
			t.Error(err)
		}
		b.Close()
	})
	return socket, gpu
}

// TestAllowPause: operators pause and resume what the program allows, while it does, and the program has it back in the end.
func TestAllowPause(t *testing.T) {
	socket, gpu := serving(t)
	p := start(t, gpu, cistern.Options{Node: socket, NodeLabel: "trainer"})
	n, err := node.Connect(p.a)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	a, err := p.d.Alloc(600*mib, p.st)
	if err != nil {
		t.Fatal(err)
	}
	op, err := control.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer op.Close()
	command := func(f func(string, time.Duration) ([]protocol.PauseResult, error)) protocol.PauseResult {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) { // until it has joined
			did, err := f("trainer", time.Minute)
			if err != nil || len(did) > 1 {
				t.Fatal(did, err)
			}
			if len(did) == 1 {
				return did[0]
			}
			if time.Now().After(end) {
				t.Fatal("it does not join")
			}
		}
	}
	paused := func() uint64 { return uint64(p.d.Stats().Paused.All.Current) }
	if r := command(op.Pause); !r.Denied || paused() != 0 {
		t.Errorf("without a consent: %+v", r)
	}
	if err := n.AllowPause(0, cistern.Selection{}, cistern.PauseOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := n.AllowPause(0, cistern.Selection{}, cistern.PauseOptions{}); err == nil {
		t.Error("two consents")
	}
	if r := command(op.Pause); r.Error != "" || r.Bytes != 600*mib || paused() != 600*mib {
		t.Errorf("%+v, %d paused", r, paused())
	}
	if r := command(op.Resume); r.Error != "" || r.Bytes != 600*mib || paused() != 0 {
		t.Errorf("%+v, %d paused", r, paused())
	}
	if r := command(op.Pause); r.Error != "" || paused() != 600*mib {
		t.Errorf("%+v, %d paused", r, paused())
	}
	// Another process takes the memory meanwhile, and has ended when the owner wants it again.
	other := start(t, gpu, cistern.Options{Node: cistern.NodeOff})
	b, err := other.d.Alloc(600*mib, other.st)
	if err != nil {
		t.Fatal(err)
	}
	var oom *cistern.OutOfMemoryError
	if err := n.DenyPause(0); !errors.As(err, &oom) || paused() != 600*mib {
		t.Error(err, paused())
	}
	if err := other.a.Free(b); err != nil {
		t.Fatal(err)
	}
	if err := other.a.Trim(); err != nil {
		t.Fatal(err)
	}
	if err := n.DenyPause(0); err != nil || paused() != 0 {
		t.Error(err, paused())
	}
	if r := command(op.Pause); !r.Denied || paused() != 0 {
		t.Errorf("after the consent: %+v", r)
	}
	if err := p.a.Free(a); err != nil {
		t.Error(err)
	}
	if err := n.AllowPause(7, cistern.Selection{}, cistern.PauseOptions{}); err == nil {
		t.Error("a device that is not there")
	}
}

// TestConnect: what one allocator caches meets a request of another one, as long as both are connected.
func TestConnect(t *testing.T) {
	socket, gpu := serving(t)
	first, second := start(t, gpu, cistern.Options{Node: socket}), start(t, gpu, cistern.Options{Node: socket})
	var conns [2]*node.Connection
	for i, p := range []program{first, second} {
		var err error
		if conns[i], err = node.Connect(p.a); err != nil {
			t.Fatal(err)
		}
		defer conns[i].Close()
	}
	p, err := first.d.Alloc(800*mib, first.st)
	if err == nil {
		err = first.a.Free(p)
	}
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		n, err := conns[1].Available(0)
		if err != nil {
			t.Fatal(err)
		}
		if n >= 1000*mib {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d MiB are available", n/mib)
		}
	}
	if _, err := second.d.Alloc(600*mib, second.st); err != nil {
		t.Fatal(err)
	}
	if c := second.d.Stats().Counters; c.ByNode != 1 {
		t.Errorf("%+v", c)
	}
	conns[1].Close()
	var oom *cistern.OutOfMemoryError
	if _, err := second.d.Alloc(400*mib, second.st); !errors.As(err, &oom) {
		t.Errorf("without a connection: %v", err)
	}
}

// TestOff: with node:off there is no connection, and everything else is as ever.
func TestOff(t *testing.T) {
	p := start(t, filepath.Join(t.TempDir(), "gpu"), cistern.Options{Node: cistern.NodeOff})
	n, err := node.Connect(p.a)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := n.Available(0); err != nil || got != 1024*mib {
		t.Error(got, err)
	}
	if got, err := n.Available(7); err == nil {
		t.Error(got)
	}
	n.Close()
}
