package broker_test

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/objects"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// withObjects is a broker over a simulated device of 1 GiB.
func withObjects(t testing.TB, opt broker.Options) (*node, *sim.Driver) {
	drv := sim.New(sim.Options{Capacity: gib, Handles: sim.Exportable})
	if opt.Objects.Open == nil {
		opt.Objects.Open = func() (objects.Driver, error) { return drv, nil }
	}
	n := newNode(t, opt, gib)
	info, err := drv.DeviceInfo(0)
	if err != nil {
		t.Fatal(err)
	}
	n.gpu.uuid = info.UUID
	return n, drv
}

func (n *node) objects(t testing.TB) *client.Objects {
	o := client.NewObjects(client.ObjectsConfig{Socket: n.socket})
	t.Cleanup(o.Close)
	return o
}

func spec(name string) protocol.ObjectSpec { return protocol.ObjectSpec{Name: name, Mode: 0o600} }

func mine(name string) protocol.ObjectName {
	return protocol.ObjectName{UID: uint32(os.Geteuid()), Name: name}
}

// cycle puts, gets and removes an object.
func cycle(n *node, o *client.Objects, bytes uint64) error {
	p, err := o.Build(n.gpu.uuid, bytes, spec("x"), []byte("{}"))
	if err != nil {
		return err
	}
	p.Close()
	if err := o.Commit(p, ""); err != nil {
		return err
	}
	f, err := o.Get(mine("x"), 0)
	if err != nil {
		return errors.Join(err, o.Remove(mine("x"), 0))
	}
	f.Close()
	return errors.Join(o.Remove(mine("x"), 0), o.Unpin(f.Generation))
}

// TestObjectCallsFail: whichever call of the driver fails, a put fails with its words, nothing is left, and the next goes well.
func TestObjectCallsFail(t *testing.T) {
	n, drv := withObjects(t, broker.Options{})
	o := n.objects(t)
	if err := cycle(n, o, 3<<20); err != nil {
		t.Fatal(err)
	}
	before, failed := descriptors(t), 0
	for k := uint64(1); ; k++ {
		var calls uint64
		name := ""
		drv.FailCall(func(call string, _ uint64) cuda.Code {
			if calls++; calls == k {
				name = call
				return cuda.ErrOutOfMemory
			}
			return cuda.Success
		})
		err := cycle(n, o, 3<<20)
		drv.FailCall(nil)
		if calls < k {
			break
		}
		failed++
		// A release is tried again, and a device that does not answer is not found.
		if err == nil != (name == "cuMemRelease") || err != nil && !strings.Contains(err.Error(), name) && !strings.Contains(err.Error(), "does not see the device") {
			t.Errorf("%s failed: %v", name, err)
		}
		if l := drv.Leaks(); l != (sim.Live{}) {
			t.Fatalf("%s failed: left %+v", name, l)
		}
		if got := descriptors(t); got != before {
			t.Fatalf("%s failed: %d descriptors are open, %d were", name, got, before)
		}
	}
	if failed < 5 {
		t.Errorf("%d calls", failed)
	}
}

// TestObjectCycles: ten thousand objects come and go at constant memory and descriptors.
func TestObjectCycles(t *testing.T) {
	n, drv := withObjects(t, broker.Options{})
	o := n.objects(t)
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	var open int
	var first uint64
	for i := range 10_000 {
		if i == 500 {
			open, first = descriptors(t), heap()
		}
		if err := cycle(n, o, 1); err != nil {
			t.Fatal(err)
		}
	}
	if got := descriptors(t); got != open {
		t.Errorf("%d descriptors are open, %d were", got, open)
	}
	if got := heap(); got > first+1<<20 {
		t.Errorf("the heap has %d bytes, %d before", got, first)
	}
	if l := drv.Leaks(); l != (sim.Live{}) {
		t.Errorf("left %+v", l)
	}
}

// TestObjectWriterDies: a writer that ends at any point before the commit leaves nothing.
func TestObjectWriterDies(t *testing.T) {
	n, drv := withObjects(t, broker.Options{})
	o := n.objects(t)
	if err := cycle(n, o, 1); err != nil {
		t.Fatal(err)
	}
	layout, err := objects.NewFile("layout", []byte("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(layout)
	text, _ := json.Marshal(spec("y"))
	before := descriptors(t)
	for reads := range 4 { // it ends after so many messages of the broker
		c := raw(t, n)
		m := protocol.Message{Kind: protocol.Build, ID: 1, UUID: n.gpu.uuid, Bytes: 5 << 20, Text: string(text)}
		if _, _, err := c.WriteMsgUnix(m.Append(nil), unix.UnixRights(layout), nil); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, protocol.MaxMessage)
		for range min(reads, 2) {
			if _, _, _, _, err := c.ReadMsgUnix(b, nil); err != nil {
				t.Fatal(err)
			}
		}
		if reads == 3 { // it hangs up while the broker may still make the memory
			_, _, _ = c.WriteMsgUnix(m.Append(nil), unix.UnixRights(layout), nil)
		}
		c.Close()
		eventually(t, "nothing is left", func() bool { return drv.Leaks() == (sim.Live{}) && descriptors(t) <= before })
	}
	if all, err := o.List(nil); err != nil || len(all) != 0 {
		t.Error(all, err)
	}
}

// slowDriver waits for the test in each creation.
type slowDriver struct {
	objects.Driver
	waits  atomic.Int32
	goesOn chan struct{}
}

func (d *slowDriver) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	d.waits.Add(1)
	<-d.goesOn
	return d.Driver.MemCreate(size, prop)
}

// TestObjectDriverHangs: a driver that does not answer delays only those who put, and what it makes late is released.
func TestObjectDriverHangs(t *testing.T) {
	drv := sim.New(sim.Options{Capacity: gib, Handles: sim.Exportable})
	slow := &slowDriver{Driver: drv, goesOn: make(chan struct{})}
	n, _ := withObjects(t, broker.Options{Objects: broker.ObjectOptions{Open: func() (objects.Driver, error) { return slow, nil }, Wait: 50 * time.Millisecond}})
	for i := range 40 {
		o := n.objects(t)
		_, err := o.Build(n.gpu.uuid, 1, spec("x"), []byte("{}"))
		if err == nil {
			t.Fatal("built")
		}
		if i >= 32 && !strings.Contains(err.Error(), "32 objects wait for the driver") {
			t.Errorf("the %dth: %v", i, err)
		}
	}
	o := n.objects(t)
	if all, err := o.List(nil); err != nil {
		t.Error(all, err)
	}
	close(slow.goesOn)
	eventually(t, "nothing is left", func() bool {
		all, err := o.List(nil)
		return err == nil && len(all) == 0 && drv.Leaks() == (sim.Live{}) && slow.waits.Load() == 32
	})
	eventually(t, "objects are built again", func() bool { return cycle(n, o, 1) == nil })
}

// TestObjectQuota: the policy's max counts what a process has reserved and the objects of its user.
func TestObjectQuota(t *testing.T) {
	n, drv := withObjects(t, broker.Options{})
	if err := n.operator(t).Set("max=600MiB"); err != nil {
		t.Fatal(err)
	}
	m, by := n.member(t, "m"), n.member(t, "by")
	o := n.objects(t)
	if err := cycle(n, o, 400<<20); err != nil {
		t.Fatal(err)
	}
	n.unused(m, by, 300<<20)
	_, err := o.Build(n.gpu.uuid, 400<<20, spec("x"), []byte("{}"))
	var refused *client.ObjectError
	if !errors.As(err, &refused) || refused.Code != protocol.CodeLimit || !strings.Contains(err.Error(), "max is 600.0 MiB") && !strings.Contains(err.Error(), "max is 600") {
		t.Error(err)
	}
	if err := cycle(n, o, 250<<20); err != nil {
		t.Error(err)
	}
	if l := drv.Leaks(); l != (sim.Live{}) {
		t.Errorf("left %+v", l)
	}
}

// TestObjectReaders: ten readers have one copy, and a name is free at once while they keep theirs.
func TestObjectReaders(t *testing.T) {
	n, drv := withObjects(t, broker.Options{})
	o := n.objects(t)
	p, err := o.Build(n.gpu.uuid, 64<<20, spec("x"), []byte("{}"))
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	if err := o.Commit(p, strings.Repeat("a", 64)); err != nil {
		t.Fatal(err)
	}
	var readers []*client.Objects
	var wg sync.WaitGroup
	for range 10 {
		r := n.objects(t)
		readers = append(readers, r)
		wg.Go(func() {
			f, err := r.Get(mine("x"), 0)
			if err != nil {
				t.Error(err)
				return
			}
			f.Close()
		})
	}
	wg.Wait()
	all, err := o.List(nil)
	if err != nil || len(all) != 1 || all[0].Readers != 10 || drv.ReservedBytes(0) != 64<<20 {
		t.Errorf("%+v, %v, %d bytes", all, err, drv.ReservedBytes(0))
	}
	n.member(t, "any") // a device is listed once a client uses it
	if d := n.b.Devices(); len(d) != 1 || d[0].Objects != 1 || d[0].ObjectBytes != 64<<20 {
		t.Errorf("%+v", d)
	}
	if err := o.Remove(mine("x"), 0); err != nil {
		t.Fatal(err)
	}
	for _, r := range readers {
		if drv.ReservedBytes(0) != 64<<20 {
			t.Error("the memory went while readers had it")
		}
		r.Close()
	}
	eventually(t, "the memory goes with the last reader", func() bool { return drv.Leaks() == (sim.Live{}) })
}

// TestObjectBrokerReplaced: a reader goes on with the next broker, and what it opened before is closed without an error.
func TestObjectBrokerReplaced(t *testing.T) {
	n, _ := withObjects(t, broker.Options{})
	o := n.objects(t)
	p, err := o.Build(n.gpu.uuid, 1, spec("x"), []byte("{}"))
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	if err := o.Commit(p, ""); err != nil {
		t.Fatal(err)
	}
	f, err := o.Get(mine("x"), 0)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	half, err := o.Build(n.gpu.uuid, 1, spec("y"), []byte("{}"))
	if err != nil {
		t.Fatal(err)
	}
	half.Close()
	n.stop()
	if _, err := o.List(nil); err == nil {
		t.Error("a broker that has ended answers")
	}
	n.start()
	if all, err := o.List(nil); err != nil || len(all) != 0 {
		t.Error(all, err)
	}
	if err := o.Commit(half, ""); err == nil {
		t.Error("a build outlived its broker")
	}
	if err := o.Unpin(f.Generation); err != nil {
		t.Error(err)
	}
	if err := cycle(n, o, 1); err != nil {
		t.Error(err)
	}
}

// FuzzObjects: whatever connections say about objects, the broker goes on, and once they have gone nothing is left of them.
func FuzzObjects(f *testing.F) {
	n, drv := withObjects(f, broker.Options{})
	good, err := objects.NewFile("layout", []byte("{}"))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { unix.Close(good) })
	open, err := unix.MemfdCreate("layout", unix.MFD_CLOEXEC)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { unix.Close(open) })
	kinds := []protocol.Kind{protocol.Build, protocol.Commit, protocol.Abandon, protocol.Get, protocol.Unpin, protocol.Remove, protocol.Objects}
	f.Add([]byte{0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 0, 0, 0, 1, 5, 0, 0, 0, 1, 4, 0, 0, 0})
	f.Add([]byte{0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 2, 5, 9, 1, 0, 2, 6, 0, 9, 9})
	keeper := n.objects(f)
	p, err := keeper.Build(n.gpu.uuid, 1, spec("kept"), []byte("{}"))
	if err != nil {
		f.Fatal(err)
	}
	p.Close()
	if err := keeper.Commit(p, ""); err != nil {
		f.Fatal(err)
	}
	pin, err := keeper.Get(mine("kept"), 0)
	if err != nil {
		f.Fatal(err)
	}
	pin.Close()
	base := drv.Leaks()
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 2000 {
			return
		}
		var conns [3]*net.UnixConn
		before := n.b.Connections()
		for i := range conns {
			c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: n.socket, Net: "unixpacket"})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			conns[i] = c
			go func() {
				b := make([]byte, protocol.MaxMessage)
				for {
					if k, _, _, _, err := c.ReadMsgUnix(b, nil); err != nil || k == 0 {
						return
					}
				}
			}()
		}
		soon(t, "they are accepted", func() bool { return n.b.Connections() == before+len(conns) })
		for s := (script{b}); len(s.b) > 0; {
			at, kind, names := s.byte(), s.byte(), s.byte()
			if at >= 250 {
				conns[at%3].Close()
				continue
			}
			m := protocol.Message{Kind: kinds[int(kind)%len(kinds)], ID: uint64(at), UUID: n.gpu.uuid, Object: p.Generation + uint64(s.byte()%8)}
			var fds []int
			switch c := s.byte(); {
			case m.Kind == protocol.Build:
				m.Bytes = s.amount()
				text, _ := json.Marshal(protocol.ObjectSpec{Name: string([]byte{'a' + names%3}), Mode: 0o600 + uint32(names&0x40)>>1})
				m.Text = string(text)
				if fds = []int{good}; c >= 240 {
					fds = []int{open}
				} else if c >= 230 {
					fds = nil
				}
			case m.Kind == protocol.Commit:
			case c >= 240:
				m.Text = string(s.b[:min(len(s.b), int(names))])
			default:
				text, _ := json.Marshal(mine(string([]byte{'a' + names%3})))
				m.Text = string(text)
			}
			_, _, _ = conns[at%3].WriteMsgUnix(m.Append(nil), unix.UnixRights(fds...), nil)
		}
		for _, c := range conns {
			c.Close()
		}
		soon(t, "their last messages are answered", func() bool { return n.b.Connections() == before })
		all, err := keeper.List(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range all {
			if o.Name == "kept" {
				continue
			}
			if o.Readers != 0 || o.State != protocol.ObjectCommitted {
				t.Errorf("left behind: %+v", o)
			}
			if err := keeper.Remove(mine(o.Name), 0); err != nil {
				t.Error(err)
			}
		}
		soon(t, "no memory is left", func() bool { return drv.Leaks() == base })
		if all, err := keeper.List(nil); err != nil || len(all) != 1 || all[0].Readers != 1 {
			t.Errorf("%+v, %v", all, err)
		}
	})
}
