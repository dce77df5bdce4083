//go:build linux && cgo

package main

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"cmp"
	"compress/gzip"
	"io"
	"strings"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/dump"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

//export coreSnapshotTake
func coreSnapshotTake(d, onlyOne C.int, pool0, pool1 C.uint64_t, out **C.cistern_snapshot) (code C.int) {
	defer caught(&code)
	l, dev, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	var segments []memory.Segment
	if dev != nil {
		if onlyOne == 0 {
			segments = dev.Views.Snapshot()
		} else {
			id := memory.PoolID{uint64(pool0), uint64(pool1)}
			segments = dev.Views.SnapshotPool(id)
			if len(segments) == 0 { // nothing in it, or no such pool
				if _, err := l.pool(dev, id); err != nil {
					return fail(err)
				}
			}
		}
	}
	*out = snapshotOf(d, segments)
	if *out == nil {
		return fail(&failure{C.CISTERN_INTERNAL, "no host memory for the snapshot"})
	}
	return C.CISTERN_OK
}

// snapshotOf lays a snapshot out as one piece of C memory: the struct, the segments, the blocks.
func snapshotOf(d C.int, segments []memory.Segment) *C.cistern_snapshot {
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
		c := &segs[i]
		c.addr, c.size, c.pool = C.uint64_t(s.Addr), C.uint64_t(s.Size), poolOf(s.Pool)
		putHandle(&c.stream, s.Handle)
		c.large, c.expandable = flag(s.Large), flag(s.Chunks != nil)
		c.first_block, c.blocks = C.size_t(at), C.size_t(len(s.Blocks))
		for j := range s.Blocks {
			b := &s.Blocks[j]
			blocks[at] = C.cistern_block{addr: C.uint64_t(b.Addr), size: C.uint64_t(b.Size), requested: C.uint64_t(b.Requested),
				pool: c.pool, device: C.int32_t(d), state: C.uint32_t(b.State), tag: C.uint32_t(b.Tag), library: C.uint8_t(b.Library),
				paused: C.uint8_t(flag(b.Paused != 0))}
			putHandle(&blocks[at].stream, s.Handle)
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
	path := goString(name)
	devices := dump.Devices(source{l.Allocator}, names())
	if err := dump.WriteFile(path, func(w io.Writer) error { return writeSnapshot(w, path, devices) }); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

func writeSnapshot(w io.Writer, name string, devices []*recording.Trace) error {
	if !strings.HasSuffix(name, ".gz") {
		return pytorch.Write(w, devices...)
	}
	z, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err != nil {
		return err
	}
	return cmp.Or(pytorch.Write(z, devices...), z.Close())
}
