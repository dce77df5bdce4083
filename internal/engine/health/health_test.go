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
