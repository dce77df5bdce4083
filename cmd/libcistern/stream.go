//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// streams finds the engine's stream that a handle means, which every request needs. A handle alone says it only of
// streams that are never destroyed: the legacy default stream, and those promised by cistern_stream_durable. Of any
// other the driver is asked for the id each time, because handles are used again, and handle 2 is another stream in
// every thread.
type streams struct {
	mu      sync.Mutex              // held while lasting is replaced
	lasting atomic.Pointer[handles] // by handle; read without a lock
	// Streams whose capture was announced, by handle. They cannot be asked what they are (cuda.Driver.StreamID), and
	// exist until the capture ends.
	captured atomic.Pointer[map[cuda.Stream]*engine.Stream]
	recent   [256]atomic.Pointer[engine.Stream] // by id: a cache, one place for each
}

// handles is a table of streams by handle with open addressing. It is replaced, never changed.
type handles struct {
	shift uint
	slots []handleSlot // at least half of them empty
	used  int
}

type handleSlot struct {
	handle cuda.Stream
	stream *engine.Stream // nil: empty
}

func (t *handles) find(h cuda.Stream) *engine.Stream {
	if t == nil {
		return nil
	}
	mask := uint(len(t.slots) - 1)
	for i := t.place(h); ; i = (i + 1) & mask {
		s := &t.slots[i&mask]
		if s.handle == h || s.stream == nil {
			return s.stream
		}
	}
}

func (t *handles) place(h cuda.Stream) uint { return uint(uint64(h) * 0x9e3779b97f4a7c15 >> t.shift) }

func (t *handles) put(h cuda.Stream, st *engine.Stream) {
	mask := uint(len(t.slots) - 1)
	i := t.place(h) & mask
	for t.slots[i].stream != nil && t.slots[i].handle != h {
		i = (i + 1) & mask
	}
	if t.slots[i].stream == nil {
		t.used++
	}
	t.slots[i] = handleSlot{h, st}
}

// with is the table and one more stream.
func (t *handles) with(h cuda.Stream, st *engine.Stream) *handles {
	next := &handles{shift: 64 - 4, slots: make([]handleSlot, 16)}
	if t != nil {
		for 2*(t.used+1) > len(next.slots) {
			next.slots = make([]handleSlot, 2*len(next.slots))
			next.shift--
		}
		for _, s := range t.slots {
			if s.stream != nil {
				next.put(s.handle, s.stream)
			}
		}
	}
	next.put(h, st)
	return next
}

// keep remembers a stream that is never destroyed.
func (s *streams) keep(h cuda.Stream, st *engine.Stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lasting.Store(s.lasting.Load().with(h, st))
}

// capture remembers a stream until its capture ends, or (nil) forgets it.
func (s *streams) capture(h cuda.Stream, st *engine.Stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := map[cuda.Stream]*engine.Stream{}
	if now := s.captured.Load(); now != nil {
		maps.Copy(next, *now)
	}
	if st == nil {
		delete(next, h)
	} else {
		next[h] = st
	}
	if len(next) == 0 {
		s.captured.Store(nil)
		return
	}
	s.captured.Store(&next)
}

// stream is the stream that a handle means on a device.
func (l *library) stream(d *engine.Device, h cuda.Stream) (*engine.Stream, error) {
	s := &l.devices[d.ID()].streams
	if h == cuda.StreamLegacy {
		h = cuda.StreamNull
	}
	if st := s.lasting.Load().find(h); st != nil {
		return st, nil
	}
	if h == cuda.StreamNull {
		st, err := d.Stream(h)
		if err == nil {
			s.keep(h, st)
		}
		return st, err
	}
	if now := s.captured.Load(); now != nil && h != cuda.StreamPerThread {
		if st := (*now)[h]; st != nil {
			return st, nil
		}
	}
	id, err := l.Driver().StreamID(d.ID(), h)
	if err != nil {
		return d.Stream(h) // the engine notes the error
	}
	slot := &s.recent[(id.ID^id.Context<<4)%uint64(len(s.recent))]
	if st := slot.Load(); st != nil && st.ID() == id {
		return st, nil
	}
	owner, err := l.owner(d, id)
	if err != nil {
		return nil, err
	}
	if owner != d {
		return nil, &failure{C.CISTERN_INVALID, fmt.Sprintf("stream %#x is a stream of device %d, not of device %d",
			uintptr(h), owner.ID(), d.ID())}
	}
	st, err := d.Stream(h)
	if err == nil && st.ID() == id {
		slot.Store(st)
	}
	return st, err
}

// owner is the device in use whose primary context a stream is of: d where none is.
func (l *library) owner(d *engine.Device, id cuda.StreamID) (*engine.Device, error) {
	for i := range l.devices {
		other, ok := l.Started(cuda.Device(i))
		if !ok || other == d {
			continue
		}
		legacy, err := l.stream(other, cuda.StreamNull)
		if err != nil {
			return nil, err
		}
		if legacy.ID().Context == id.Context {
			return other, nil
		}
	}
	return d, nil
}

// anyStream is the stream that a handle means where no device is named with it: one of the device given, unless the
// handle is known, or its context says, that it is another's.
func (l *library) anyStream(d *engine.Device, h cuda.Stream) (*engine.Stream, error) {
	if h <= cuda.StreamPerThread || len(l.devices) == 1 {
		return l.stream(d, h)
	}
	if st := l.devices[d.ID()].streams.lasting.Load().find(h); st != nil {
		return st, nil
	}
	for i := range l.devices {
		s := &l.devices[i].streams
		if st := s.lasting.Load().find(h); st != nil {
			return st, nil
		}
		if now := s.captured.Load(); now != nil && (*now)[h] != nil {
			return (*now)[h], nil
		}
	}
	id, err := l.Driver().StreamID(d.ID(), h)
	if err != nil {
		return d.Stream(h)
	}
	owner, err := l.owner(d, id)
	if err != nil {
		return nil, err
	}
	return l.stream(owner, h)
}

//export coreStreamDurable
func coreStreamDurable(d C.int, h C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	handle := cuda.Stream(h)
	if handle == cuda.StreamPerThread {
		return fail(&failure{C.CISTERN_INVALID, "stream 2 is another stream in every thread, which ends with it"})
	}
	if _, err := l.stream(dev, handle); err != nil {
		return fail(err)
	}
	st, err := dev.Stream(handle, config.StreamDurable)
	if err != nil {
		return fail(err)
	}
	if handle == cuda.StreamLegacy {
		handle = cuda.StreamNull
	}
	l.devices[d].streams.keep(handle, st)
	return C.CISTERN_OK
}
