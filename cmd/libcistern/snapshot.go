//go:build linux && cgo

package main

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/trace"
)

//export coreSnapshotTake
func coreSnapshotTake(d, onlyOne C.int, pool0, pool1 C.uint64_t, out **C.cistern_snapshot) (code C.int) {
	defer caught(&code)
	l, dev, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	var segments []cistern.Segment
	var streams []*cistern.Stream
	if dev != nil {
		if onlyOne == 0 {
			segments = dev.Snapshot()
		} else {
			id := cistern.PoolID{uint64(pool0), uint64(pool1)}
			segments = dev.SnapshotPool(id)
			if len(segments) == 0 { // nothing in it, or no such pool
				if _, err := l.pool(dev, id); err != nil {
					return fail(err)
				}
			}
		}
		streams = dev.Streams() // after the segments, so that it has theirs
	}
	*out = snapshotOf(d, segments, streams)
	if *out == nil {
		return fail(&failure{C.CISTERN_INTERNAL, "no host memory for the snapshot"})
	}
	return C.CISTERN_OK
}

// snapshotOf lays a snapshot out as one piece of C memory: the struct, the segments, the blocks.
func snapshotOf(d C.int, segments []cistern.Segment, streams []*cistern.Stream) *C.cistern_snapshot {
	n := 0
	for i := range segments {
		n += len(segments[i].Blocks)
	}
	const head, segment, block = C.sizeof_cistern_snapshot, C.sizeof_cistern_segment, C.sizeof_cistern_block
	mem := C.calloc(1, C.size_t(head+segment*len(segments)+block*n))
	if mem == nil {
		return nil
	}
	snap := (*C.cistern_snapshot)(mem)
	segs := unsafe.Slice((*C.cistern_segment)(unsafe.Add(mem, head)), len(segments))
	blocks := unsafe.Slice((*C.cistern_block)(unsafe.Add(mem, head+segment*len(segments))), n)
	snap.segments, snap.num_segments = unsafe.SliceData(segs), C.size_t(len(segs))
	snap.blocks, snap.num_blocks = unsafe.SliceData(blocks), C.size_t(n)
	at := 0
	for i := range segments {
		s := &segments[i]
		var handle cuda.Stream
		if s.Stream >= 0 && s.Stream < len(streams) {
			handle = streams[s.Stream].Handle()
		}
		c := &segs[i]
		c.addr, c.size, c.pool = C.uint64_t(s.Addr), C.uint64_t(s.Size), poolOf(s.Pool)
		putHandle(&c.stream, handle)
		c.large, c.expandable = flag(s.Large), flag(s.Chunks != nil)
		c.first_block, c.blocks = C.size_t(at), C.size_t(len(s.Blocks))
		for j := range s.Blocks {
			b := &s.Blocks[j]
			blocks[at] = C.cistern_block{addr: C.uint64_t(b.Addr), size: C.uint64_t(b.Size), requested: C.uint64_t(b.Requested),
				pool: c.pool, device: C.int32_t(d), state: C.uint32_t(b.State), tag: C.uint32_t(b.Tag), library: C.uint8_t(b.Library),
				paused: C.uint8_t(flag(b.Paused != 0))}
			putHandle(&blocks[at].stream, handle)
			at++
		}
	}
	return snap
}

// putHandle writes a stream handle, which is a number, into a field of C memory that C calls a pointer.
func putHandle(field *unsafe.Pointer, h cuda.Stream) { *(*uintptr)(unsafe.Pointer(field)) = uintptr(h) }

func flag(b bool) C.uint32_t {
	if b {
		return 1
	}
	return 0
}

//export coreSnapshotWrite
func coreSnapshotWrite(name *C.char) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	var devices []*trace.Trace
	for i := range l.devices {
		if dev, ok := l.Started(cuda.Device(i)); ok {
			devices = append(devices, recorded(dev))
		}
	}
	if err := writeFile(goString(name), devices); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

// recorded is what a device holds now and, where its history is on, what led to it.
func recorded(dev *cistern.Device) *trace.Trace {
	t := &trace.Trace{Device: int(dev.ID()), Format: "cistern", Stacks: []trace.Stack{nil}}
	events, lost := dev.History()
	segments := dev.Snapshot()
	t.Events, t.FromStart = events, lost == 0
	// After the events and segments, so that they have all that those name.
	for _, id := range dev.Pools() {
		t.Pools = append(t.Pools, trace.PoolID(id))
	}
	for _, st := range dev.Streams() {
		t.Streams = append(t.Streams, uint64(st.Handle()))
	}
	if len(t.Streams) == 0 {
		t.Streams = []uint64{0} // of spare chunks that no stream has used
	}
	for _, s := range segments {
		stream := uint32(max(s.Stream, 0))
		g := trace.Segment{Addr: s.Addr, Size: s.Size, Stream: stream, Pool: s.Number, Large: s.Large, Expandable: s.Chunks != nil}
		for _, b := range s.Blocks {
			g.Blocks = append(g.Blocks, trace.Block{Addr: b.Addr, Size: b.Size, Requested: b.Requested, Stream: stream,
				Pool: s.Number, State: trace.BlockState(b.State)})
		}
		t.Final = append(t.Final, g)
	}
	return t
}

// writeFile writes a snapshot beside its place and moves it there, so that nobody finds half of one. What is no regular
// file (a pipe, a device) is written to as it is.
func writeFile(name string, devices []*trace.Trace) error {
	st, err := os.Stat(name)
	if err == nil && !st.Mode().IsRegular() {
		f, err := os.OpenFile(name, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		return cmp.Or(writeSnapshot(f, name, devices), f.Close())
	}
	place := name
	if err == nil {
		if place, err = filepath.EvalSymlinks(name); err != nil {
			return err
		}
	}
	beside := fmt.Sprintf("%s.%d-%d", place, os.Getpid(), unfinished.Add(1))
	f, err := os.OpenFile(beside, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	err = cmp.Or(writeSnapshot(f, name, devices), f.Close())
	if err == nil {
		err = os.Rename(beside, place)
	}
	if err != nil {
		os.Remove(beside)
	}
	return err
}

// unfinished numbers the files that are being written.
var unfinished atomic.Int64

func writeSnapshot(f io.Writer, name string, devices []*trace.Trace) error {
	buffered := bufio.NewWriterSize(f, 1<<16)
	if !strings.HasSuffix(name, ".gz") {
		return cmp.Or(trace.WritePyTorch(buffered, devices...), buffered.Flush())
	}
	z, err := gzip.NewWriterLevel(buffered, gzip.BestSpeed)
	if err != nil {
		return err
	}
	return cmp.Or(trace.WritePyTorch(z, devices...), z.Close(), buffered.Flush())
}
