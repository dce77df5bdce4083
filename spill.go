package cistern

import (
	"cmp"
	"sync"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/nopoll"
)

// spill is a file with contents. It has no name from the start, and its room goes with the last of them. Between it and
// the GPU is page-locked memory in several parts: while one is read or written, others are copied.
type spill struct {
	file *nopoll.Kept
	sums fileSums
	size uint64 // guarded by Device.pausing: up to where it is given out
	live uint64 // guarded by Device.mu
}

const (
	spillParts = 4
	spillPart  = 16 << 20
)

func newSpill(dir string) (*spill, error) {
	f, err := nopoll.TempFile(dir, "cistern-paused-")
	if err != nil {
		return nil, err
	}
	return &spill{file: f}, nil
}

// place gives a piece its room. The caller holds Device.pausing and Device.mu.
func (f *spill) place(p *piece) *piece {
	x := &piece{addr: p.addr, size: p.size, spill: f, at: f.size}
	f.size += p.size
	f.live += p.size
	return x
}

// drop forgets so many bytes. The caller holds Device.mu.
func (f *spill) drop(bytes uint64) {
	if f.live -= bytes; f.live == 0 {
		f.file.Close() // what it says is of no interest: nobody reads the file again
	}
}

// holdFiles keeps the files of pieces open until done is called: blocks may be freed while their contents are on their way.
// Both are for holders of Device.mu.
func holdFiles(pieces []piece) (done func()) {
	held := map[*spill]bool{}
	for _, p := range pieces {
		if p.spill != nil && !held[p.spill] {
			held[p.spill] = true
			p.spill.live++
		}
	}
	return func() {
		for f := range held {
			f.drop(1)
		}
	}
}

// batch is what goes through one part of the staging memory: pieces that lie one behind the other in a file, up to a multiple
// of spillPart there.
type batch struct {
	file   *spill
	at     uint64 // in the file
	size   uint64
	pieces []piece
}

// batches cuts pieces up so that each batch fits a part.
func batches(pieces []piece) (out []batch) {
	for _, p := range pieces {
		for p.size > 0 {
			n := len(out)
			if n == 0 || out[n-1].file != p.spill || out[n-1].at+out[n-1].size != p.at || p.at%spillPart == 0 {
				out = append(out, batch{file: p.spill, at: p.at})
				n++
			}
			b := &out[n-1]
			x := p
			x.size = min(p.size, spillPart-p.at%spillPart)
			b.pieces = append(b.pieces, x)
			b.size += x.size
			p.addr, p.at, p.size = p.addr+x.size, p.at+x.size, p.size-x.size
		}
	}
	return out
}

// staging is the parts, of vault memory that holds nothing. They are given back by calling done. No lock but
// Device.pausing is held.
func (d *Device) staging() (parts []cuda.Ptr, done func(), err error) {
	d.mu.Lock()
	var held []*piece
	for range spillParts {
		n := len(held)
		for s := d.vault.room(); s != nil && s.size-s.next < spillPart; s = d.vault.room() {
			held = d.vault.place(held, &piece{size: s.size - s.next}) // the rest of a slab is too little
			n = len(held)
		}
		held = d.vault.place(held, &piece{size: spillPart})
		parts = append(parts, cuda.Ptr(n))
	}
	d.mu.Unlock()
	done = func() {
		d.mu.Lock()
		for _, p := range held {
			p.slab.live -= p.size
		}
		d.mu.Unlock()
	}
	if err = d.vault.fill()(); err != nil {
		done()
		return nil, nil, err
	}
	for i, n := range parts {
		p := held[n]
		parts[i] = p.slab.base + cuda.Ptr(p.at)
	}
	return parts, done, nil
}

// hostBytes is page-locked memory as the host sees it.
func hostBytes(p cuda.Ptr, n uint64) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p))), n)
}

// spillOut writes pieces to their file.
//
// +checklocks:d.pausing
func (d *Device) spillOut(pieces []piece) error {
	return d.stream(batches(pieces), func(part cuda.Ptr, b *batch, st cuda.Stream) error {
		at := part
		for _, p := range b.pieces {
			if err := d.drv.MemcpyAsync(d.id, at, cuda.Ptr(p.addr), p.size, st); err != nil {
				return err
			}
			at += cuda.Ptr(p.size)
		}
		return nil
	}, nil, func(part cuda.Ptr, b *batch) error {
		data := hostBytes(part, b.size)
		b.file.sums.add(data, b.at)
		_, err := b.file.file.WriteAt(data, int64(b.at))
		return err
	})
}

// spillIn reads them back.
//
// +checklocks:d.pausing
func (d *Device) spillIn(pieces []piece) error {
	return d.stream(batches(pieces), func(part cuda.Ptr, b *batch, st cuda.Stream) error {
		at := part
		for _, p := range b.pieces {
			if err := d.drv.MemcpyAsync(d.id, cuda.Ptr(p.addr), at, p.size, st); err != nil {
				return err
			}
			at += cuda.Ptr(p.size)
		}
		return nil
	}, func(part cuda.Ptr, b *batch) error {
		data := hostBytes(part, b.size)
		if _, err := b.file.file.ReadAt(data, int64(b.at)); err != nil {
			return err
		}
		return b.file.sums.check(data, b.at, b.file.file)
	}, nil)
}

// stream takes batches through the staging memory, several at a time: before (nil: nothing), then the copies, which are
// waited for, then after.
//
// +checklocks:d.pausing
func (d *Device) stream(list []batch, copies func(cuda.Ptr, *batch, cuda.Stream) error, before, after func(cuda.Ptr, *batch) error) error {
	st, err := d.copyStream()
	if err != nil {
		return err
	}
	parts, done, err := d.staging()
	if err != nil {
		return err
	}
	defer done()
	var mu sync.Mutex // guards next and first, and keeps a batch's copies together with their event
	var first error
	next := 0
	var wg sync.WaitGroup
	for _, part := range parts {
		wg.Go(func() {
			ev, err := d.timeline.Event()
			if err == nil {
				defer d.timeline.PutEvent(ev)
			}
			for {
				mu.Lock()
				first = cmp.Or(first, err)
				if first != nil || next == len(list) {
					mu.Unlock()
					return
				}
				b := &list[next]
				next++
				mu.Unlock()
				if before != nil {
					if err = before(part, b); err != nil {
						continue
					}
				}
				mu.Lock()
				if err = copies(part, b, st); err == nil {
					err = d.drv.EventRecord(d.id, ev, st)
				}
				mu.Unlock()
				if err == nil {
					err = d.drv.EventSynchronize(d.id, ev)
				}
				if err == nil && after != nil {
					err = after(part, b)
				}
			}
		})
	}
	wg.Wait()
	if sync := d.copied(); first == nil { // in any case: nothing may be under way behind a failure
		first = sync
	}
	if code, ok := codeOf(first); ok && code.Poisons() {
		d.health.Failed(first)
	}
	return first
}
