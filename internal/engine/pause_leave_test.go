package engine_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// Memory goes while later memory is copied, and comes back while later memory is mapped; and what becomes of that when
// something fails.

// calls notes the driver calls that f makes.
func (p *pausing) calls(f func() error) (names []string) {
	p.t.Helper()
	p.drv.FailCall(func(call string, _ uint64) cuda.Code {
		names = append(names, call)
		return cuda.Success
	})
	err := f()
	p.drv.FailCall(nil)
	if err != nil {
		p.t.Fatal(err)
	}
	return names
}

// several is a program whose memory is paused in several stretches.
func several(t *testing.T) (*pausing, []cuda.Ptr) {
	t.Helper()
	t.Cleanup(engine.SetStretch(4 * mib))
	p := newPausing(t, sim.Options{}, config.Options{ChunkMax: 2 * mib})
	var blocks []cuda.Ptr
	for i := range 6 {
		b := p.alloc(nil, 4*mib, 1)
		p.fill(b, 4*mib, byte(i))
		blocks = append(blocks, b)
	}
	return p, blocks
}

func (p *pausing) holdAll(blocks []cuda.Ptr) {
	p.t.Helper()
	for i, b := range blocks {
		p.holds(b, 4*mib, byte(i))
	}
}

func TestPauseOverlaps(t *testing.T) {
	p, blocks := several(t)
	p.pause(all, config.PauseOptions{}) // which gets the page-locked memory
	p.resume(all)
	lastOf := func(list []string, name string) int {
		for i := len(list) - 1; i >= 0; i-- {
			if list[i] == name {
				return i
			}
		}
		t.Fatalf("no %s in %v", name, list)
		return 0
	}
	out := p.calls(func() error { _, err := p.d.Pause(all, config.PauseOptions{}); return err })
	if lastOf(out, "cuMemcpyAsync") > slices.Index(out, "cuMemUnmap") || lastOf(out, "cuEventSynchronize") < slices.Index(out, "cuMemRelease") {
		t.Errorf("pause: all copies are to be queued before memory goes, and the first to go while the last is copied: %v", out)
	}
	if p.d.Views.Stats().Reserved.All.Current != 0 || p.drv.ReservedBytes(0) != 0 {
		t.Errorf("%d bytes are held, the device says %d", p.d.Views.Stats().Reserved.All.Current, p.drv.ReservedBytes(0))
	}
	in := p.calls(func() error { _, err := p.d.Resume(all); return err })
	if lastOf(in, "cuMemCreate") > slices.Index(in, "cuMemMap") || lastOf(in, "cuMemMap") < slices.Index(in, "cuMemcpyAsync") {
		t.Errorf("resume: all memory is to be got before any is mapped, and the first copied while the last is mapped: %v", in)
	}
	p.holdAll(blocks)
}

// When the memory that went first cannot stay away, because something fails behind it, it is got anew with its contents.
func TestPauseUndone(t *testing.T) {
	for _, call := range []string{"cuMemUnmap", "cuEventSynchronize"} {
		p, blocks := several(t)
		n, created := 0, 0
		p.drv.FailCall(func(name string, _ uint64) cuda.Code {
			if name == "cuMemCreate" {
				created++
			}
			if name == call {
				if n++; n == 4 {
					return cuda.ErrInvalidValue
				}
			}
			return cuda.Success
		})
		_, err := p.d.Pause(all, config.PauseOptions{})
		p.drv.FailCall(nil)
		if !errors.Is(err, cuda.ErrInvalidValue) || strings.Contains(err.Error(), "stays paused") {
			t.Fatalf("%s fails: %v", call, err)
		}
		if st := p.d.Views.Stats(); st.Paused.All.Current != 0 || st.Reserved.All.Current != 24*mib || p.drv.ReservedBytes(0) != 24*mib || created != 6 {
			t.Errorf("%s fails: %d bytes are paused, %d held, %d chunks were got", call, st.Paused.All.Current, st.Reserved.All.Current, created)
		}
		p.holdAll(blocks)
		p.pause(all, config.PauseOptions{})
		p.resume(all)
		p.holdAll(blocks)
	}
}

// Where somebody else has taken the memory meanwhile, what went stays paused, with its contents, and the rest is there.
func TestPauseUndoneInPart(t *testing.T) {
	p, blocks := several(t)
	n := 0
	p.drv.FailCall(func(name string, _ uint64) cuda.Code {
		switch {
		case name == "cuMemUnmap":
			if n++; n == 4 {
				return cuda.ErrInvalidValue
			}
		case name == "cuMemCreate":
			return cuda.ErrOutOfMemory
		}
		return cuda.Success
	})
	_, err := p.d.Pause(all, config.PauseOptions{})
	p.drv.FailCall(nil)
	if err == nil || !strings.Contains(err.Error(), "stays paused") {
		t.Fatal(err)
	}
	st := p.d.Views.Stats()
	if st.Paused.All.Current != 12*mib || st.Reserved.All.Current != 12*mib || p.drv.ReservedBytes(0) != 12*mib ||
		st.Reserved.All.Current+st.Paused.All.Current != st.ActiveBytes.All.Current+st.InactiveBytes.All.Current {
		t.Errorf("%d bytes are paused, %d held, the device says %d", st.Paused.All.Current, st.Reserved.All.Current, p.drv.ReservedBytes(0))
	}
	for i, b := range blocks[3:] {
		p.holds(b, 4*mib, byte(3+i))
	}
	p.resume(all)
	p.holdAll(blocks)
}

// A block that is given back while earlier memory is copied, or has gone, is waited for, and goes for good.
func TestFreedWhileOthersGo(t *testing.T) {
	p, blocks := several(t)
	freed := false
	p.d.OnUnmap(func(addr cuda.Ptr, _ uint64) {
		if addr >= blocks[1] && !freed {
			freed = true
			if err := p.a.Free(blocks[4]); err != nil {
				t.Error(err)
			}
		}
	})
	r := p.pause(all, config.PauseOptions{})
	if !freed || p.d.Views.Stats().Paused.All.Current != 20*mib || r.Bytes != 20*mib || p.drv.ReservedBytes(0) != 0 {
		t.Errorf("%d bytes are paused, %+v", p.d.Views.Stats().Paused.All.Current, r)
	}
	p.d.OnUnmap(nil)
	p.resume(all)
	for i, b := range blocks {
		if i != 4 {
			p.holds(b, 4*mib, byte(i))
		}
	}
	if err := p.drv.Fault(); err != nil {
		t.Error(err)
	}
}

// A resume that cannot map what it has got undoes everything and asks elsewhere for memory before it gives up.
func TestResumeCannotMap(t *testing.T) {
	p, blocks := several(t)
	p.pause(all, config.PauseOptions{})
	for _, code := range []cuda.Code{cuda.ErrOutOfMemory, cuda.ErrInvalidValue} {
		n := 0
		p.drv.FailCall(func(name string, _ uint64) cuda.Code {
			if name == "cuMemSetAccess" {
				if n++; n > 3 {
					return code
				}
			}
			return cuda.Success
		})
		_, err := p.d.Resume(all)
		p.drv.FailCall(nil)
		if !errors.Is(err, code) || p.d.Views.Stats().Paused.All.Current != 24*mib || p.drv.ReservedBytes(0) != 0 {
			t.Errorf("%v: %v: %d bytes are paused, %d held", code, err, p.d.Views.Stats().Paused.All.Current, p.drv.ReservedBytes(0))
		}
	}
	p.resume(all)
	p.holdAll(blocks)
}
