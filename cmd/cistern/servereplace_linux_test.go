package main

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	allocator "github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/node"
)

// TestServeReplace: a broker takes over from the one that runs, real processes all: objects stay, readers notice nothing, and the place is
// never without a broker. A successor that fails changes nothing.
func TestServeReplace(t *testing.T) {
	dir := shortFolder(t)
	socket, gpu := filepath.Join(dir, "s"), "sim:1GiB@"+filepath.Join(dir, "gpu")
	conf := []string{"CISTERN_CONF=driver:" + gpu}
	first := &serving{t: t}
	first.start(conf, nil, "--socket", socket, "--replace") // none runs
	drv, err := open.Open(gpu)
	if err != nil {
		t.Fatal(err)
	}
	a, err := allocator.New(drv, allocator.Options{Node: socket})
	if err != nil {
		t.Fatal(err)
	}
	here := node.OpenObjects(a)
	put := putter(t, drv, here)
	get := func(name string) *node.Object {
		t.Helper()
		x, err := here.Open(0, node.ObjectName{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	read := func(x *node.Object) string {
		b := make([]byte, 3)
		copyHost(t, drv, x.Ptr(), b, false)
		return string(b)
	}
	put("one", "old")
	put("one", "abc")
	put("gone", "xyz")
	reader, gone := get("one"), get("gone")
	if err := here.Remove(node.ObjectName{Name: "gone"}); err != nil {
		t.Fatal(err)
	}
	unfinished, err := here.Build(0, node.ObjectSpec{Name: "unfinished", Size: 1})
	if err != nil {
		t.Fatal(err)
	}

	// One that asks for all and goes away.
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write((&protocol.Message{Kind: protocol.Handover, ID: 1}).Append(nil)); err != nil {
		t.Fatal(err)
	}
	var names []string
	for b := make([]byte, protocol.MaxMessage); ; {
		n, err := c.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		m, err := protocol.Parse(b[:n])
		if err != nil || m.Text != "" && m.Kind == protocol.End {
			t.Fatal(m.Text, err)
		}
		if m.Kind == protocol.End {
			break
		}
		names = append(names, m.Text)
	}
	if len(names) != 3+3 { // chunk, layout, description; the socket, the lock, a pipe
		t.Errorf("it passes %v", names)
	}
	c.Close()
	soon(t, "the broker goes on", func() bool { return strings.Contains(first.log.String(), "this broker goes on") })
	put("two", "def")
	if err := unfinished.Abandon(); err != nil {
		t.Error(err)
	}
	if unfinished, err = here.Build(0, node.ObjectSpec{Name: "unfinished", Size: 1}); err != nil {
		t.Fatal(err)
	}

	before := first
	for _, flag := range []string{"--debug", "--dry-run"} { // twice: what was taken over is handed over too
		next := &serving{t: t}
		next.start(conf, nil, "--socket", socket, "--replace", flag)
		if !strings.Contains(next.log.String(), "this broker has taken over") || !strings.Contains(next.log.String(), "objects=2") {
			t.Error(next.log.String())
		}
		if err := before.cmd.Wait(); err != nil {
			t.Errorf("the broker before: %v", err)
		}
		if !strings.Contains(before.log.String(), "another broker has taken over") {
			t.Error(before.log.String())
		}
		if got := read(reader); got != "abc" {
			t.Errorf("a reader has %q", got)
		}
		x, y := get("one"), get("two")
		if read(x) != "abc" || read(y) != "def" || x.Info().Generation != reader.Info().Generation || x.Info().Labels["model"] != "x" {
			t.Errorf("%q, %q, %+v", read(x), read(y), x.Info())
		}
		for _, x := range []*node.Object{x, y} {
			if err := x.Close(); err != nil {
				t.Error(err)
			}
		}
		if _, errs, code := asCommand(t, nil, "serve", "--socket", socket); code != exitBad || !strings.Contains(errs, "another broker serves at "+socket) {
			t.Error(errs, code)
		}
		before = next
	}
	if err := unfinished.Commit(""); err == nil {
		t.Error("a build outlived its broker")
	}
	if got := read(gone); got != "xyz" {
		t.Errorf("removed, and open: %q", got)
	}
	put("one", "new")
	if got := read(reader); got != "abc" {
		t.Errorf("a reader has %q", got)
	}
	for _, name := range []string{"one", "two"} {
		if _, errs, code := asCommand(t, nil, "node", "rm", name, "--socket", socket); code != 0 {
			t.Error(errs, code)
		}
	}
	for _, x := range []*node.Object{reader, gone} {
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	}
	soon(t, "all memory is free", func() bool {
		free, total, err := drv.MemInfo(0)
		return err == nil && free == total
	})
	before.ends(syscall.SIGTERM, 0)
	if _, err := os.Lstat(socket); !os.IsNotExist(err) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

// TestServeReplaceRefused: what is no broker, is older, or runs under systemd does not hand over, and says so.
func TestServeReplaceRefused(t *testing.T) {
	dir := shortFolder(t)
	socket := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	answer := protocol.Message{Kind: protocol.Refused, Text: "a conversation begins with a message \"kind 33\""} // as brokers before did
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(longest))
			_, _ = c.Read(make([]byte, protocol.MaxMessage))
			_, _ = c.Write(answer.Append(nil))
			c.Close()
		}
	}()
	if _, errs, code := asCommand(t, nil, "serve", "--replace", "--socket", socket); code != exitBad || !strings.Contains(errs, "the broker at "+socket+" does not hand over: a conversation begins") ||
		strings.Count(errs, "\n") != 1 {
		t.Error(errs, code)
	}
	l.Close()
	if _, errs, code := asCommand(t, []string{"NOTIFY_SOCKET=" + filepath.Join(dir, "n")}, "serve", "--replace", "--socket", socket); code != exitBad || !strings.Contains(errs, "systemd keeps objects already") {
		t.Error(errs, code)
	}
	s := &serving{t: t}
	s.start([]string{"NOTIFY_SOCKET=" + filepath.Join(dir, "n")}, nil, "--socket", socket)
	if _, errs, code := asCommand(t, nil, "serve", "--replace", "--socket", socket); code != exitBad || !strings.Contains(errs, "restart it there") {
		t.Error(errs, code)
	}
	s.ends(syscall.SIGTERM, 0)
}
