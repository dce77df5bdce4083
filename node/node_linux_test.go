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

// TestConnect: what one allocator caches meets a request of another one, as long as both are connected.
func TestConnect(t *testing.T) {
	dir, err := os.MkdirTemp("", "node") // a socket's path has to be short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	gpu, socket := filepath.Join(dir, "gpu"), filepath.Join(dir, "s")
	b, err := broker.New(broker.Options{Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error)
	go func() { over <- b.Serve(ctx, l) }()
	defer func() {
		cancel()
		if err := <-over; err != nil {
			t.Error(err)
		}
	}()
	first, second := start(t, gpu, cistern.Options{Node: socket}), start(t, gpu, cistern.Options{Node: socket})
	var conns [2]*node.Connection
	for i, p := range []program{first, second} {
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
