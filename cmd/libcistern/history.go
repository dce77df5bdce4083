//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// maxHistory bounds the events of cistern_history, 64 bytes each.
const maxHistory = 1 << 30

//export coreHistory
func coreHistory(d C.int, n C.size_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	if n > maxHistory {
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("a history of %d events: at most %d", uint64(n), maxHistory)})
	}
	l.forReports.Lock()
	defer l.forReports.Unlock()
	l.forReports.began = false // from here on it is the caller's
	if d == -1 {
		l.SetHistory(int(n))
		for i := range l.devices {
			record(cuda.Device(i), n > 0)
		}
		return C.CISTERN_OK
	}
	var dev *engine.Device
	if n == 0 {
		dev, err = l.idle(d)
	} else {
		dev, err = l.device(d)
	}
	if err != nil {
		return fail(err)
	}
	if dev != nil {
		dev.History.SetLimit(int(n))
		record(dev.ID(), n > 0)
	}
	return C.CISTERN_OK
}

// kindOf is the number that cistern.h gives a kind of event, 0 where it has none.
func kindOf(k event.Kind) C.uint32_t {
	switch k {
	case event.Alloc:
		return C.CISTERN_EVENT_ALLOC
	case event.FreeRequested:
		return C.CISTERN_EVENT_FREE_REQUESTED
	case event.FreeCompleted:
		return C.CISTERN_EVENT_FREE_COMPLETED
	case event.SegmentAlloc:
		return C.CISTERN_EVENT_SEGMENT_ALLOC
	case event.SegmentFree:
		return C.CISTERN_EVENT_SEGMENT_FREE
	case event.SegmentMap:
		return C.CISTERN_EVENT_SEGMENT_MAP
	case event.SegmentUnmap:
		return C.CISTERN_EVENT_SEGMENT_UNMAP
	case event.OOM:
		return C.CISTERN_EVENT_OOM
	}
	return 0
}

//export coreHistoryHash
func coreHistoryHash(d C.int, hash *C.uint64_t) (code C.int) {
	defer caught(&code)
	_, dev, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	if dev != nil {
		*hash = C.uint64_t(dev.History.TakeHash())
	}
	return C.CISTERN_OK
}

//export coreHistoryDrain
func coreHistoryDrain(d C.int, buf *C.cistern_event, capacity C.size_t, n *C.size_t, lost *C.uint64_t) (code C.int) {
	defer caught(&code)
	l, dev, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	if dev == nil {
		return C.CISTERN_OK
	}
	l.devices[d].draining.Lock()
	defer l.devices[d].draining.Unlock()
	out := unsafe.Slice(buf, min(capacity, maxHistory))
	written := 0
	var events []event.Event
	for more := true; more; {
		var missed uint64
		// What cistern.h has no name for is left out, so it may take several pieces to fill the buffer.
		want := min(len(out)-written, 1<<14)
		events, missed = dev.History.Take(events[:0], want)
		if lost != nil {
			*lost += C.uint64_t(missed)
		}
		if len(events) == 0 {
			break
		}
		more = len(events) == want
		streams, pools := dev.Views.Streams(), dev.Views.Pools() // after the events, so that they have theirs
		for i := range events {
			e := &events[i]
			kind := kindOf(e.Kind)
			if kind == 0 {
				continue
			}
			out[written] = C.cistern_event{time_us: C.int64_t(e.TimeUS), addr: C.uint64_t(e.Addr), size: C.uint64_t(e.Size),
				handle: C.uint64_t(e.Handle), kind: kind, tag: C.uint32_t(e.Tag), thread: C.uint32_t(e.Thread)}
			if int(e.Pool) < len(pools) {
				out[written].pool = poolOf(pools[e.Pool])
			}
			if int(e.Stream) < len(streams) { // a new spare chunk belongs to none
				putHandle(&out[written].stream, streams[e.Stream].Handle())
			}
			written++
		}
	}
	*n = C.size_t(written)
	return C.CISTERN_OK
}
