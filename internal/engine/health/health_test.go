package health_test

import (
	"fmt"
	"reflect"
	"sync"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine/health"
)

func state(t *testing.T) *health.State {
	t.Helper()
	return health.New(sim.New(sim.Options{}), 0)
}

// Only an error that breaks the context does, and the first one is kept.
func TestBroken(t *testing.T) {
	s := state(t)
	if err := s.Failed(cuda.ErrOutOfMemory); err != cuda.ErrOutOfMemory || s.Broken() != nil || !s.Quick() {
		t.Fatalf("after out of memory: returned %v, broken %v, quick %v", err, s.Broken(), s.Quick())
	}
	first := fmt.Errorf("copy: %w", cuda.ErrIllegalAddress)
	s.Failed(first)
	s.Failed(cuda.ErrLaunchFailed)
	if s.Broken() != first || s.Quick() {
		t.Errorf("broken by %v, quick %v; want %v, false", s.Broken(), s.Quick(), first)
	}
	if s.SetRecording(false); s.Quick() {
		t.Error("the hot path is used again while the context is broken")
	}
}

// Threads that change what Quick depends on leave it as the last state demands.
func TestQuick(t *testing.T) {
	for range 200 {
		s := state(t)
		var all sync.WaitGroup
		all.Go(func() { s.SetRecording(true) })
		all.Go(func() { s.Failed(cuda.ErrIllegalAddress) })
		all.Wait()
		if s.Quick() {
			t.Fatal("quick while requests are recorded and the context is broken")
		}
	}
	s := state(t)
	s.SetRecording(true)
	if s.Quick() || !s.Recording() {
		t.Error("quick while requests are recorded")
	}
	if s.SetRecording(false); !s.Quick() {
		t.Error("not quick after recording has ended")
	}
}

// Every function of the driver that calls CUDA is counted, those included that are added to the interface later.
func TestEveryCallIsCounted(t *testing.T) {
	free := map[string]bool{"Name": true, "Version": true, "Now": true, "DeviceCount": true}
	driver := reflect.TypeFor[cuda.Driver]()
	for i := range driver.NumMethod() {
		name := driver.Method(i).Name
		d := &health.Driver{} // without a driver behind it
		m := reflect.ValueOf(d).MethodByName(name)
		args := make([]reflect.Value, m.Type().NumIn())
		for k := range args {
			args[k] = reflect.Zero(m.Type().In(k))
		}
		func() {
			defer func() { recover() }()
			m.Call(args)
		}()
		want := uint64(1)
		if free[name] {
			want = 0
		}
		if n := d.Calls(); n != want {
			t.Errorf("%s counts as %d calls; want %d", name, n, want)
		}
	}
}

// New memory of a device that is not admitted is out of memory, without a call. Memory of the host is not asked about.
func TestAdmit(t *testing.T) {
	drv := sim.New(sim.Options{Capacity: 1 << 30})
	if err := drv.RetainContext(0); err != nil {
		t.Fatal(err)
	}
	s := health.New(drv, 0)
	var asked []uint64
	s.Driver.Admit = func(dev cuda.Device, size uint64) bool {
		asked = append(asked, size)
		return dev == 0 && size <= 2<<20
	}
	prop := cuda.MemProp{}
	for _, c := range []struct {
		op   string
		call func(size uint64) error
	}{
		{"cuMemCreate", func(size uint64) error { _, err := s.Driver.MemCreate(size, prop); return err }},
		{"cuMemAlloc", func(size uint64) error { _, err := s.Driver.MemAlloc(0, size); return err }},
	} {
		before := s.Driver.Calls()
		err := c.call(4 << 20)
		if want := (&cuda.Error{Op: c.op, Size: 4 << 20, Code: cuda.ErrOutOfMemory}); !reflect.DeepEqual(err, want) || s.Driver.Calls() != before {
			t.Errorf("%s: %v after %d calls", c.op, err, s.Driver.Calls()-before)
		}
		if err := c.call(2 << 20); err != nil || s.Driver.Calls() != before+1 {
			t.Errorf("%s: %v", c.op, err)
		}
	}
	prop.Location = cuda.LocationHostNUMA
	_, _ = s.Driver.MemCreate(4<<20, prop)
	if want := []uint64{4 << 20, 2 << 20, 4 << 20, 2 << 20}; !reflect.DeepEqual(asked, want) {
		t.Errorf("asked about %v, want %v", asked, want)
	}
}
