package sim

import (
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// Copies and other work that has contents. The bytes are copied when the call is made, in the order of the calls, which
// is an order that the program allows if it has no race; that the copy takes time is modelled on its stream, and until
// then its ranges are in use, so that the checker finds memory that is taken away under it.

// piece is a part of one side of a copy: bytes of a chunk, or of the process.
type piece struct {
	chunk *chunk // nil for memory of the process
	off   uint64 // in the chunk, or the address
	size  uint64
}

// side is one side of a copy.
type side struct {
	addr, size uint64
	pieces     []piece
	tracked    bool // memory that the driver knows, so that its use is noted
	kind       copyKind
	device     cuda.Device // where kind is copyDevice
}

// copyKind is what a side of a copy is to the machine.
type copyKind uint8

const (
	copyDevice   copyKind = iota
	copyPinned            // host memory that the driver knows
	copyPageable          // other memory of the process
)

// deviceSpace reports whether an address is one that the driver may have given out for device memory.
func (d *Driver) deviceSpace(addr uint64) bool { return addr >= spaceBase && addr < d.space.high }

// side finds the memory of [addr, addr+size) for work of dev. Memory of devices may be made of several mappings; a range
// of host memory must not leave the allocation or registration that it begins in, nor enter one (H200: INVALID_VALUE).
func (d *Driver) side(c call, dev cuda.Device, addr, size uint64) (side, error) {
	out := side{addr: addr, size: size, tracked: true}
	invalid := func() error { return d.errorOf(c, dev, size, cuda.ErrInvalidValue) }
	end := addr + size
	if end < addr || addr == 0 {
		return out, invalid()
	}
	if d.space.find(addr) == nil && !d.deviceSpace(addr) {
		out.kind = copyPageable
		if m := d.hostAt(addr); m != nil {
			if end > m.base+m.size {
				return out, invalid()
			}
			out.kind = copyPinned
		} else if d.overlapsHost(addr, size) {
			return out, invalid()
		}
		out.tracked = out.kind == copyPinned
		out.pieces = append(out.pieces, piece{nil, addr, size})
		return out, nil
	}
	// A copy may use what the calling device can use, or what is its own device's: that one's engine does it then.
	f := d.mapped(dev, addr, size, callNames[c])
	if f != nil && f.Kind == FaultNoAccess {
		f = d.mapped(f.chunk.prop.Device, addr, size, callNames[c])
	}
	if f != nil {
		f.code = cuda.ErrInvalidValue
		return out, d.found(f)
	}
	for p := addr; p < end; {
		m, r := d.regionAt(p)
		n := min(end, r.base+r.size) - p
		out.pieces = append(out.pieces, piece{m.chunk, p - m.base, n})
		if p == addr {
			out.device = m.chunk.prop.Device
			if m.chunk.prop.Location == cuda.LocationHostNUMA {
				out.kind = copyPinned
			}
		}
		p += n
	}
	return out, nil
}

// transfer copies the bytes; false where memory of the process was not there.
func transfer(dst, src []piece) bool {
	return guarded(func() {
		var buf [contentPage]byte
		for len(dst) > 0 && len(src) > 0 {
			to, from := &dst[0], &src[0]
			n := min(to.size, from.size)
			switch {
			case to.chunk == nil && from.chunk == nil:
				copy(hostBytes(to.off, n), hostBytes(from.off, n))
			case to.chunk == nil:
				from.chunk.read(from.off, hostBytes(to.off, n))
			case from.chunk == nil:
				to.chunk.write(to.off, hostBytes(from.off, n))
			case from.chunk.data == nil && from.chunk.windows == nil && from.chunk.file == nil:
				to.chunk.forget(to.off, n)
			default:
				n = min(n, contentPage)
				from.chunk.read(from.off, buf[:n])
				to.chunk.write(to.off, buf[:n])
			}
			for _, p := range [...]*piece{to, from} {
				p.off += n
				p.size -= n
			}
			if to.size == 0 {
				dst = dst[1:]
			}
			if from.size == 0 {
				src = src[1:]
			}
		}
	})
}

// runCopy queues work that reads one side and writes the other; a side without size is none.
func (d *Driver) runCopy(s *stream, dev cuda.Device, duration time.Duration, c call, dst, src side) error {
	t := d.queue(s, duration)
	var m mark
	if d.opt.Check >= CheckOrder {
		d.order.prepare(s)
		m = d.order.next(s)
	}
	if d.opt.Check == CheckNone {
		return nil
	}
	var found *Fault
	if src.tracked && src.size != 0 {
		found = d.touch(s, dev, src.addr, src.size, t, m, true, callNames[c])
	}
	if dst.tracked && dst.size != 0 {
		if f := d.touch(s, dev, dst.addr, dst.size, t, m, false, callNames[c]); found == nil {
			found = f
		}
	}
	return d.found(found)
}

// MemcpyAsync copies between any two addresses, at once; the stream is busy for as long as it takes.
func (d *Driver) MemcpyAsync(dev cuda.Device, dst, src cuda.Ptr, size uint64, sh cuda.Stream) error {
	d.mu.Lock()
	defer d.leave()
	const c = callMemcpy
	s, err := d.streamCall(c, dev, sh, 0)
	if err != nil {
		return err
	}
	if err := d.refuseCaptured(c, dev, s); err != nil || size == 0 {
		return err
	}
	from, err := d.side(c, dev, uint64(src), size)
	if err != nil {
		return err
	}
	to, err := d.side(c, dev, uint64(dst), size)
	if err != nil {
		return err
	}
	if to.kind == copyDevice {
		if f := d.readOnly(dev, to.addr, size, callNames[c]); f != nil {
			f.Stream = s.id
			return d.found(f)
		}
	}
	if err := d.runCopy(s, dev, d.costs.copies(from, to), c, to, from); err != nil {
		return err
	}
	if !transfer(to.pieces, from.pieces) {
		return d.found(&Fault{Kind: FaultUnmapped, Op: callNames[c], Device: dev, Stream: s.id, Addr: uint64(dst), Size: size,
			code: cuda.ErrInvalidValue, Detail: "one side of the copy is neither the driver's memory nor the process's"})
	}
	return nil
}

// Write is Use of memory that writes b there, as a kernel would.
func (d *Driver) Write(dev cuda.Device, sh cuda.Stream, p cuda.Ptr, b []byte) error {
	return d.workWith(dev, sh, p, b, false)
}

// ReadBack is Read of memory that gives what is there, to tests, in b. Memory that was never written is Poison.
func (d *Driver) ReadBack(dev cuda.Device, sh cuda.Stream, p cuda.Ptr, b []byte) error {
	return d.workWith(dev, sh, p, b, true)
}

func (d *Driver) workWith(dev cuda.Device, sh cuda.Stream, p cuda.Ptr, b []byte, read bool) error {
	size := uint64(len(b))
	if d.CaptureID(dev, sh) != 0 {
		return &cuda.Error{Op: launch, Device: dev, Size: size, Code: cuda.ErrNotSupported} // graphs have no contents
	}
	if err := d.work(dev, sh, p, size, lagged, read); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.leave()
	for at := uint64(p); len(b) > 0; {
		m, r := d.regionAt(at)
		if r == nil {
			return &cuda.Error{Op: launch, Device: dev, Size: size, Code: cuda.ErrIllegalAddress}
		}
		part := b[:min(uint64(len(b)), r.base+r.size-at)]
		switch known := m == d.hostAt(at); {
		case known && read:
			copy(part, hostBytes(at, uint64(len(part))))
		case known:
			copy(hostBytes(at, uint64(len(part))), part)
		case read:
			m.chunk.read(at-m.base, part)
		default:
			m.chunk.write(at-m.base, part)
		}
		at += uint64(len(part))
		b = b[len(part):]
	}
	return nil
}

// refuseCaptured fails a call that would become a node of a graph: graphs of the simulated device are of kernels alone.
func (d *Driver) refuseCaptured(c call, dev cuda.Device, s *stream) error {
	if s.capture == nil && len(s.ctx.captures) == 0 {
		return nil
	}
	if code := s.implicit(); code != cuda.Success {
		return d.captureError(c, dev, code)
	}
	if s.capture == nil {
		return nil
	}
	if d.opt.Check == CheckNone {
		return d.errorOf(c, dev, 0, cuda.ErrStreamCaptureUnsupported)
	}
	return d.found(&Fault{Kind: FaultCapture, Op: callNames[c], Device: dev, Stream: s.id, code: cuda.ErrStreamCaptureUnsupported,
		Detail: "the stream is being captured: the call would become a node of the graph, which the simulated device cannot do"})
}
