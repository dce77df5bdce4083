package main

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	allocator "github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/node"
	"golang.org/x/sys/unix"
)

// manager keeps descriptors for a service, as systemd does.
type manager struct {
	t      *testing.T
	conn   *net.UnixConn
	path   string
	mu     sync.Mutex
	names  []string
	files  []*os.File
	stored int // ever
}

func newManager(t *testing.T, path string) *manager {
	t.Helper()
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	m := &manager{t: t, conn: c, path: path}
	over := make(chan struct{})
	go func() {
		defer close(over)
		m.serve()
	}()
	t.Cleanup(func() {
		c.Close()
		<-over
		for _, f := range m.files {
			f.Close()
		}
	})
	return m
}

func (m *manager) serve() {
	b, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	for {
		n, oobn, _, _, err := m.conn.ReadMsgUnix(b, oob)
		if err != nil {
			return
		}
		values := map[string]string{}
		for line := range strings.Lines(string(b[:n])) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			values[key] = value
		}
		m.mu.Lock()
		switch {
		case values["FDSTORE"] == "1":
			all, err := unix.ParseSocketControlMessage(oob[:oobn])
			if err != nil || len(all) != 1 {
				m.t.Errorf("%q came without a descriptor", b[:n])
				break
			}
			fds, err := unix.ParseUnixRights(&all[0])
			if err != nil || len(fds) != 1 {
				m.t.Errorf("%q came with %d descriptors", b[:n], len(fds))
				break
			}
			m.names = append(m.names, values["FDNAME"])
			m.files = append(m.files, os.NewFile(uintptr(fds[0]), values["FDNAME"]))
			m.stored++
		case values["FDSTOREREMOVE"] == "1":
			for i := len(m.names) - 1; i >= 0; i-- {
				if m.names[i] == values["FDNAME"] {
					m.files[i].Close()
					m.names, m.files = append(m.names[:i], m.names[i+1:]...), append(m.files[:i], m.files[i+1:]...)
				}
			}
		}
		m.mu.Unlock()
	}
}

func (m *manager) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.names)
}

// TestServeObjects: objects of real processes, over a device that they share: they outlive the writer and, with a service manager that
// keeps descriptors, the broker's death; commands list and remove them.
func TestServeObjects(t *testing.T) {
	dir := shortFolder(t)
	socket, gpu := filepath.Join(dir, "s"), "sim:1GiB@"+filepath.Join(dir, "gpu")
	m := newManager(t, filepath.Join(dir, "notify"))
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l.SetUnlinkOnClose(false)
	l.Close()
	start := func() *serving {
		m.mu.Lock()
		names := append([]string{"cistern-node.socket"}, m.names...)
		files := []*os.File{f}
		for _, kept := range m.files { // copies: a message that is still read may have one forgotten
			fd, err := unix.FcntlInt(kept.Fd(), unix.F_DUPFD_CLOEXEC, 3)
			if err != nil {
				m.mu.Unlock()
				t.Fatal(err)
			}
			files = append(files, os.NewFile(uintptr(fd), kept.Name()))
			defer files[len(files)-1].Close()
		}
		m.mu.Unlock()
		s := &serving{t: t}
		s.start([]string{"LISTEN_FDS=" + strconv.Itoa(len(files)), "LISTEN_FDNAMES=" + strings.Join(names, ":"), "NOTIFY_SOCKET=" + m.path, "CISTERN_CONF=driver:" + gpu}, files)
		return s
	}
	s := start()
	if out, errs, code := asCommand(t, nil, "node", "ls", "--objects", "--socket", socket); code != 0 || out != "there are no objects\n" {
		t.Error(out, errs, code)
	}
	drv, err := open.Open(gpu)
	if err != nil {
		t.Fatal(err)
	}
	a, err := allocator.New(drv, allocator.Options{Node: socket})
	if err != nil {
		t.Fatal(err)
	}
	writer := node.OpenObjects(a)
	put := putter(t, drv, writer)
	put("weights/x", "old")
	put("weights/x", "abc")
	put("gone", "gone")
	if err := writer.Remove(node.ObjectName{Name: "gone"}); err != nil {
		t.Fatal(err)
	}
	unfinished, err := writer.Build(0, node.ObjectSpec{Name: "unfinished", Size: 1})
	if err != nil {
		t.Fatal(err)
	}
	soon(t, "one object is stored, and nothing else", func() bool { return m.count() == 3 })
	reader := node.OpenObjects(a)
	before, err := reader.Open(0, node.ObjectName{Name: "weights/x"})
	if err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	if m.stored != 9 {
		t.Errorf("%d descriptors were stored", m.stored)
	}
	m.mu.Unlock()
	s.ends(syscall.SIGKILL, -1)
	s = start()
	if err := unfinished.Commit(""); err == nil {
		t.Error("a build outlived its broker")
	}
	read := func(x *node.Object) string {
		b := make([]byte, 3)
		copyHost(t, drv, x.Ptr(), b, false)
		return string(b)
	}
	after, err := writer.Open(0, node.ObjectName{Name: "weights/x"})
	if err != nil {
		t.Fatal(err)
	}
	if x, y := read(before), read(after); x != "abc" || y != "abc" || before.Info().Generation != after.Info().Generation {
		t.Errorf("%q before, %q after; %+v", x, y, after.Info())
	}
	soon(t, "the memory is the next broker's", func() bool {
		free, total, err := drv.MemInfo(0)
		return err == nil && total-free == 4<<20 // twice the granularity
	})
	if _, err := reader.List(); err != nil { // it connects, and pins again
		t.Fatal(err)
	}
	out, errs, code := asCommand(t, nil, "node", "stat", "weights/x", "--json", "--socket", socket)
	var list struct {
		Objects []struct {
			Name    string            `json:"name"`
			Readers int               `json:"readers"`
			State   string            `json:"state"`
			Labels  map[string]string `json:"labels"`
		} `json:"objects"`
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil || code != 0 || len(list.Objects) != 1 || list.Objects[0].Readers != 2 || list.Objects[0].Labels["model"] != "x" {
		t.Error(out, errs, code, err)
	}
	if out, errs, code := asCommand(t, nil, "node", "ls", "--objects", "--socket", socket); code != 0 || !strings.Contains(out, "weights/x") || !strings.Contains(out, "model=x") {
		t.Error(out, errs, code)
	}
	if out, errs, code := asCommand(t, nil, "node", "rm", "weights/x", "--socket", socket); code != 0 || out != "" {
		t.Error(out, errs, code)
	}
	soon(t, "nothing is stored", func() bool { return m.count() == 0 })
	if x := read(after); x != "abc" {
		t.Errorf("removed, and open: %q", x)
	}
	for _, x := range []*node.Object{before, after} {
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	}
	soon(t, "all memory is free", func() bool {
		free, total, err := drv.MemInfo(0)
		return err == nil && free == total
	})
	for want, args := range map[string][]string{
		`no such object: "weights/x"`:    {"node", "rm", "weights/x"},
		"has no object":                  {"node", "stat", "weights/x"},
		"expected letters":               {"node", "rm", "a b"},
		"expected the name of one":       {"node", "stat"},
		"there is no such user":          {"node", "rm", "--user", "nobody-of-this-name", "x"},
		"--objects 0: expected 1 to":     {"serve", "--objects", "0"},
		"--object-memory x: expected a ": {"serve", "--object-memory", "x"},
	} {
		if args[0] == "node" {
			args = append(args, "--socket", socket)
		}
		if _, errs, code := asCommand(t, nil, args...); code != exitBad || !strings.Contains(errs, want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: %q, %d, want %q", args, errs, code, want)
		}
	}
	s.ends(syscall.SIGTERM, 0)
}

// copyHost copies between the device and b.
func copyHost(t *testing.T, drv cuda.Driver, p cuda.Ptr, b []byte, up bool) {
	t.Helper()
	host := cuda.Ptr(uintptr(unsafe.Pointer(&b[0])))
	dst, src := host, p
	if up {
		dst, src = p, host
	}
	if err := errors.Join(drv.MemcpyAsync(0, dst, src, uint64(len(b)), 0), drv.StreamSynchronize(0, 0)); err != nil {
		t.Fatal(err)
	}
}

// putter makes objects of 3 MiB that begin with a text.
func putter(t *testing.T, drv cuda.Driver, o *node.Objects) func(name, text string) {
	return func(name, text string) {
		t.Helper()
		b, err := o.Build(0, node.ObjectSpec{Name: name, Size: 3 << 20, Labels: map[string]string{"model": "x"}})
		if err != nil {
			t.Fatal(err)
		}
		copyHost(t, drv, b.Ptr(), []byte(text), true)
		if err := b.Commit(""); err != nil {
			t.Fatal(err)
		}
	}
}
