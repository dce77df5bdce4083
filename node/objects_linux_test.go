package node_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/objects"
	"github.com/cistern-gpu/cistern/node"
)

// machine is a broker with objects, over a device of 1 GiB that processes share.
type machine struct {
	gpu, socket string
	b           *broker.Broker
}

func newMachine(t *testing.T, o broker.Options) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("", "node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	m := &machine{gpu: filepath.Join(dir, "gpu"), socket: filepath.Join(dir, "s")}
	o.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	if o.Objects.Open == nil {
		o.Objects.Open = func() (objects.Driver, error) { return open.Open("sim:1GiB@" + m.gpu) }
	}
	if m.b, err = broker.New(o); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: m.socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan error)
	go func() { over <- m.b.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-over; err != nil {
			t.Error(err)
		}
		m.b.Close()
	})
	return m
}

// objects are those of a new process.
func (m *machine) objects(t *testing.T) (program, *node.Objects) {
	p := start(t, m.gpu, cistern.Options{Node: m.socket})
	o := node.OpenObjects(p.a)
	t.Cleanup(o.Close)
	return p, o
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (p program) write(t *testing.T, at cuda.Ptr, text string) {
	t.Helper()
	b := []byte(text)
	var pin runtime.Pinner // and so it is not on the stack, which moves
	defer pin.Unpin()
	pin.Pin(&b[0])
	must(t, p.a.Driver().MemcpyAsync(0, at, cuda.Ptr(uintptr(unsafe.Pointer(&b[0]))), uint64(len(b)), 0))
	must(t, p.a.Driver().StreamSynchronize(0, 0))
}

func (p program) read(t *testing.T, at cuda.Ptr, n int) string {
	t.Helper()
	b := make([]byte, n)
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&b[0])
	must(t, p.a.Driver().MemcpyAsync(0, cuda.Ptr(uintptr(unsafe.Pointer(&b[0]))), at, uint64(n), 0))
	must(t, p.a.Driver().StreamSynchronize(0, 0))
	return string(b)
}

// used is the memory of the device that is not free.
func (p program) used(t *testing.T) uint64 {
	t.Helper()
	free, total, err := p.a.Driver().MemInfo(0)
	must(t, err)
	return total - free
}

// eventually waits for what the broker does by itself.
func eventually(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// TestBuildMakesRoom: an object that the device has no memory for gets the unused memory of its writer and of other processes; what is in
// use stays, and the error says so.
func TestBuildMakesRoom(t *testing.T) {
	m := newMachine(t, broker.Options{Objects: broker.ObjectOptions{MostBytes: 1 << 40}})
	connect := func() (program, *node.Objects) {
		p := start(t, m.gpu, cistern.Options{Node: m.socket, NodeWait: time.Minute})
		n, err := node.Connect(p.a)
		must(t, err)
		t.Cleanup(n.Close)
		o := node.OpenObjects(p.a)
		t.Cleanup(o.Close)
		return p, o
	}
	writer, out := connect()
	other, _ := connect()
	cache := func(p program, bytes uint64) {
		x, err := p.d.Alloc(bytes, p.st)
		must(t, err)
		must(t, p.a.Free(x))
	}
	cache(writer, 300*mib)
	kept, err := other.d.Alloc(200*mib, other.st)
	must(t, err)
	cache(other, 400*mib)
	b, err := out.Build(0, node.ObjectSpec{Name: "own", Size: 300 * mib}) // as much as the writer has cached
	must(t, err)
	must(t, b.Commit(""))
	if own, others := writer.d.Stats().Reserved.All.Current, other.d.Stats().Reserved.All.Current; own >= 300*mib || others != 600*mib {
		t.Errorf("%d MiB are reserved, %d MiB by another process", own/mib, others/mib)
	}
	spec := node.ObjectSpec{Name: "others", Size: 500 * mib}
	if b, err = out.Build(0, spec); err != nil { // it waits for what the other process used a moment ago
		t.Fatal(err)
	}
	must(t, b.Commit(""))
	if got := other.d.Stats().Reserved.All.Current; got < 200*mib || got > 300*mib {
		t.Errorf("another process has %d MiB reserved", got/mib)
	}
	_, err = out.Build(0, node.ObjectSpec{Name: "large", Size: 400 * mib})
	if !errors.Is(err, cuda.ErrOutOfMemory) || !strings.Contains(err.Error(), "other processes: ") {
		t.Error(err)
	}
	must(t, other.a.Free(kept))
}

func TestObjects(t *testing.T) {
	m := newMachine(t, broker.Options{})
	writer, out := m.objects(t)
	tensors := []node.Tensor{{Name: "a", DType: "F32", Shape: []uint64{2, 1}, Size: 8}, {Name: "b", DType: "U8", Shape: []uint64{5}, Size: 5}}
	must(t, node.LayOut(tensors))
	if tensors[1].Offset != 512 {
		t.Fatal(tensors)
	}
	put := func(text string) uint64 {
		b, err := out.Build(0, node.ObjectSpec{Name: "weights/x", Tensors: tensors, Size: 100 * mib, Labels: map[string]string{"model": "x"}})
		must(t, err)
		writer.write(t, b.Ptr()+512, text)
		sum := sha256.Sum256([]byte(text))
		must(t, b.Commit(hex.EncodeToString(sum[:])))
		if err := b.Commit(""); err == nil {
			t.Error("committed twice")
		}
		must(t, b.Abandon())
		return b.Generation()
	}
	first := put("first")
	reader, in := m.objects(t)
	x, err := in.Open(0, node.ObjectName{Name: "weights/x"})
	must(t, err)
	if got := x.Tensors(); len(got) != 2 || got[1].Name != "b" || got[1].Offset != 512 || got[0].Shape[0] != 2 {
		t.Errorf("%+v", got)
	}
	if got := reader.read(t, x.Ptr()+512, 5); got != "first" {
		t.Errorf("%q", got)
	}
	i := x.Info()
	if i.Generation != first || i.Size != 100*mib || i.Mode != 0o600 || i.User != uint32(os.Geteuid()) || i.PID != os.Getpid() || i.Labels["model"] != "x" ||
		len(i.Layout) != 64 || len(i.Contents) != 64 || i.Reserved != 100*mib {
		t.Errorf("%+v", i)
	}
	out.Close() // as the end of the writer
	if got := writer.used(t); got != 100*mib {
		t.Errorf("%d MiB are used: expected one copy", got/mib)
	}
	twice, err := in.Open(0, node.ObjectName{Name: "weights/x", Generation: first})
	must(t, err)
	if twice.Ptr() != x.Ptr() {
		t.Error("mapped twice")
	}
	must(t, twice.Close())
	if s := reader.d.Stats(); s.ImportedBytes != 100*mib || s.Reserved.All.Current != 0 {
		t.Errorf("%d bytes are imported and %d reserved", s.ImportedBytes, s.Reserved.All.Current)
	}

	// Another generation: the reader keeps its own.
	second := put("again")
	if got := reader.read(t, x.Ptr()+512, 5); got != "first" {
		t.Errorf("%q", got)
	}
	y, err := in.Open(0, node.ObjectName{Name: "weights/x"})
	must(t, err)
	if got := reader.read(t, y.Ptr()+512, 5); got != "again" || y.Info().Generation != second {
		t.Errorf("%q of %d", got, y.Info().Generation)
	}
	all, err := in.Stat(node.ObjectName{Name: "weights/x"})
	must(t, err)
	if len(all) != 2 || all[0].State != "removed" || all[1].State != "committed" || all[0].Readers != 1 {
		t.Errorf("%+v", all)
	}
	must(t, x.Close())
	if all, err = in.List(); err != nil || len(all) != 1 {
		t.Errorf("%+v, %v", all, err)
	}
	if got := writer.used(t); got != 100*mib {
		t.Errorf("%d MiB are used after the first generation", got/mib)
	}
	if _, err := in.Open(0, node.ObjectName{Name: "weights/x", Generation: first}); !errors.Is(err, node.ErrObjectNotFound) {
		t.Error(err)
	}
	must(t, in.Remove(node.ObjectName{Name: "weights/x"}))
	if got := reader.read(t, y.Ptr()+512, 5); got != "again" {
		t.Errorf("removed, and open: %q", got)
	}
	if _, err := in.Open(0, node.ObjectName{Name: "weights/x"}); !errors.Is(err, node.ErrObjectNotFound) {
		t.Error(err)
	}
	must(t, y.Close())
	if s := reader.d.Stats(); s.ImportedBytes != 0 {
		t.Errorf("%d bytes are imported in the end", s.ImportedBytes)
	}
	if got := writer.used(t); got != 0 {
		t.Errorf("%d MiB are used in the end", got/mib)
	}
	if err := in.Remove(node.ObjectName{Name: "weights/x"}); !errors.Is(err, node.ErrObjectNotFound) {
		t.Error(err)
	}
}

// TestReaderWrites: work that writes through a reader's mapping breaks that reader alone.
func TestReaderWrites(t *testing.T) {
	m := newMachine(t, broker.Options{})
	writer, out := m.objects(t)
	b, err := out.Build(0, node.ObjectSpec{Name: "x", Size: mib})
	must(t, err)
	writer.write(t, b.Ptr(), "right")
	must(t, b.Commit(""))
	bad, in := m.objects(t)
	x, err := in.Open(0, node.ObjectName{Name: "x"})
	must(t, err)
	text := []byte("wrong")
	if err := bad.a.Driver().MemcpyAsync(0, x.Ptr(), cuda.Ptr(uintptr(unsafe.Pointer(&text[0]))), 5, 0); err == nil {
		t.Error("a reader's write went well")
	}
	good, in2 := m.objects(t)
	y, err := in2.Open(0, node.ObjectName{Name: "x"})
	must(t, err)
	if got := good.read(t, y.Ptr(), 5); got != "right" {
		t.Errorf("%q", got)
	}
}

func TestObjectsFail(t *testing.T) {
	m := newMachine(t, broker.Options{Objects: broker.ObjectOptions{Most: 3}})
	p, o := m.objects(t)
	for want, spec := range map[string]node.ObjectSpec{
		"0 bytes":        {Name: "x"},
		"name":           {Name: "../x y", Size: 1},
		"mode":           {Name: "x", Size: 1, Mode: 0o666},
		"label":          {Name: "x", Size: 1, Labels: map[string]string{"a": "b c"}},
		"time to live":   {Name: "x", Size: 1, TTL: -time.Second},
		"do not lie":     {Name: "x", Size: 4, Tensors: []node.Tensor{{Name: "t", DType: "U8", Shape: []uint64{8}, Size: 8}}},
		"of shape":       {Name: "x", Size: 40, Tensors: []node.Tensor{{Name: "t", DType: "F32", Shape: []uint64{8}, Size: 8}}},
		"memory already": {Name: "x", Size: 1000 * mib},
	} {
		if _, err := o.Build(0, spec); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	rest, err := p.d.Alloc(300*mib, p.st)
	must(t, err)
	if _, err := o.Build(0, node.ObjectSpec{Name: "x", Size: 800 * mib}); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Error(err)
	}
	must(t, p.a.Free(rest))
	for range 3 {
		_, err := o.Build(0, node.ObjectSpec{Name: "x", Size: 1})
		must(t, err)
	}
	if _, err := o.Build(0, node.ObjectSpec{Name: "x", Size: 1}); !errors.Is(err, node.ErrObjectLimit) {
		t.Error(err)
	}
	_, other := m.objects(t)
	o.Close() // builds leave nothing
	eventually(t, "builds of a process that ended stay", func() bool { all, err := other.List(); must(t, err); return len(all) == 0 })

	none := node.OpenObjects(start(t, m.gpu, cistern.Options{Node: filepath.Join(t.TempDir(), "none")}).a)
	if _, err := none.List(); !errors.Is(err, node.ErrNoBroker) {
		t.Error(err)
	}
	m = newMachine(t, broker.Options{Objects: broker.ObjectOptions{Open: func() (objects.Driver, error) { return nil, errors.New("no GPU to use") }}})
	_, o = m.objects(t)
	if _, err := o.Build(0, node.ObjectSpec{Name: "x", Size: 1}); err == nil || !strings.Contains(err.Error(), "no driver for objects: no GPU to use") {
		t.Error(err)
	}
	if all, err := o.List(); err != nil || len(all) != 0 {
		t.Error(all, err)
	}
}

// TestObjectExpires: an object goes when no process has had it open for its time.
func TestObjectExpires(t *testing.T) {
	m := newMachine(t, broker.Options{})
	_, o := m.objects(t)
	b, err := o.Build(0, node.ObjectSpec{Name: "x", Size: 1, TTL: time.Nanosecond})
	must(t, err)
	must(t, b.Commit(""))
	eventually(t, "the object stays", func() bool { all, err := o.List(); must(t, err); return len(all) == 0 })
}
