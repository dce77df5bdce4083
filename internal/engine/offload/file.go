package offload

import (
	"cmp"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/nopoll"
)

// Between a file and the GPU is page-locked memory in several parts: while one is read or written, others are copied.
const (
	fileParts = 4
	partSize  = 16 << 20
)

// File is a file with contents.
type File struct {
	kept *nopoll.Kept
	sums fileSums
	size uint64       // up to where it is given out
	live atomic.Int64 // bytes of contents in it, and its users
}

// NewFile creates a file without a name in a folder; empty is the system's folder for temporary files.
func NewFile(dir string) (*File, error) {
	kept, err := nopoll.TempFile(dir, "cistern-paused-")
	if err != nil {
		return nil, err
	}
	f := &File{kept: kept}
	f.live.Store(1)
	return f, nil
}

// Place gives contents their places in the file.
func (f *File) Place(list []*Contents) {
	place(list, func(placed []*piece, p *piece) []*piece {
		x := &piece{addr: p.addr, size: p.size, file: f, at: f.size}
		f.size += p.size
		f.live.Add(int64(p.size))
		return append(placed, x)
	})
}

// Close closes the file once nothing is in it. Nothing may be placed in it afterwards.
func (f *File) Close() { f.drop(1) }

// drop forgets so many bytes or users.
func (f *File) drop(n uint64) {
	if f.live.Add(-int64(n)) == 0 {
		f.kept.Close() // its error does not matter: the file is not read again
	}
}

func (f *File) write(data []byte, at uint64) error {
	f.sums.add(data, at)
	_, err := f.kept.WriteAt(data, int64(at))
	return err
}

func (f *File) read(data []byte, at uint64) error {
	if _, err := f.kept.ReadAt(data, int64(at)); err != nil {
		return err
	}
	return f.sums.check(data, at, f.kept)
}

// SaveToFile copies a batch to its file and waits for that.
func (s *Store) SaveToFile(b *Batch) error { return s.transfer(b.disk, true) }

// LoadFiles copies back what a batch has in files and waits for that. The contents keep their places.
func (s *Store) LoadFiles(b *Batch) error { return s.transfer(b.disk, false) }

// section goes through one part of the staging memory: pieces that lie one behind the other in a file, up to a multiple of
// partSize there.
type section struct {
	file   *File
	at     uint64 // in the file
	size   uint64
	pieces []piece
}

// sections cuts pieces up so that each section fits a part.
func sections(pieces []piece) (out []section) {
	for _, p := range pieces {
		for p.size > 0 {
			n := len(out)
			if n == 0 || out[n-1].file != p.file || out[n-1].at+out[n-1].size != p.at || p.at%partSize == 0 {
				out = append(out, section{file: p.file, at: p.at})
				n++
			}
			b := &out[n-1]
			x := p
			x.size = min(p.size, partSize-p.at%partSize)
			b.pieces = append(b.pieces, x)
			b.size += x.size
			p.addr, p.at, p.size = p.addr+x.size, p.at+x.size, p.size-x.size
		}
	}
	return out
}

// stagingParts is the parts, of page-locked memory without contents. They are given back by calling done.
func (s *Store) stagingParts() (parts []cuda.Ptr, done func(), err error) {
	var held []*piece
	var at []int
	for range fileParts {
		for b := s.staging.room(); b != nil && b.size-b.next < partSize; b = s.staging.room() {
			held = s.staging.place(held, &piece{size: b.size - b.next}) // the rest of a slab is too small
		}
		at = append(at, len(held))
		held = s.staging.place(held, &piece{size: partSize})
	}
	done = func() {
		for _, p := range held {
			p.slab.live.Add(-int64(p.size))
		}
	}
	if err = s.staging.fill()(); err != nil {
		done()
		return nil, nil, err
	}
	for _, i := range at {
		parts = append(parts, held[i].slab.base+cuda.Ptr(held[i].at))
	}
	return parts, done, nil
}

// hostBytes is page-locked memory as the host sees it.
func hostBytes(p cuda.Ptr, n uint64) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p))), n)
}

// transfer takes sections through the staging memory, several at a time.
type transfer struct {
	store  *Store
	stream cuda.Stream
	out    bool // to the file

	mu    sync.Mutex // guards what follows, and keeps a section's copies together with their event
	list  []section
	first error
}

// transfer copies pieces to their files, or from there. After an error no copy is under way, unless the store is unsure.
func (s *Store) transfer(pieces []piece, out bool) error {
	if len(pieces) == 0 {
		return nil
	}
	st, err := s.copyStream()
	if err != nil {
		return err
	}
	parts, done, err := s.stagingParts()
	if err != nil {
		return err
	}
	defer done()
	x := &transfer{store: s, stream: st, out: out, list: sections(pieces)}
	var wg sync.WaitGroup
	for _, part := range parts {
		wg.Go(func() { x.run(part) })
	}
	wg.Wait()
	return s.health.Failed(cmp.Or(x.first, s.wait()))
}

// run takes sections through one part until none is left or one failed.
func (x *transfer) run(part cuda.Ptr) {
	t := x.store.timeline
	ev, err := t.Event()
	if err != nil {
		x.next(err)
		return
	}
	defer t.PutEvent(ev)
	for b := x.next(nil); b != nil; b = x.next(err) {
		err = x.move(part, b, ev)
	}
}

// next is the next section, nil when there is none or something failed.
func (x *transfer) next(err error) (b *section) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.first = cmp.Or(x.first, err)
	if x.first == nil && len(x.list) > 0 {
		b, x.list = &x.list[0], x.list[1:]
	}
	return b
}

func (x *transfer) move(part cuda.Ptr, b *section, ev cuda.Event) error {
	data := hostBytes(part, b.size)
	if !x.out {
		if err := b.file.read(data, b.at); err != nil {
			return err
		}
	}
	if err := x.queue(part, b, ev); err != nil {
		return err
	}
	h := x.store.health
	if err := h.Driver.EventSynchronize(h.ID, ev); err != nil {
		return err
	}
	if x.out {
		return b.file.write(data, b.at)
	}
	return nil
}

// queue queues the copies of a section and records the event behind them.
func (x *transfer) queue(part cuda.Ptr, b *section, ev cuda.Event) error {
	h := x.store.health
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, p := range b.pieces {
		dst, src := part, cuda.Ptr(p.addr)
		if !x.out {
			dst, src = src, dst
		}
		if err := h.Driver.MemcpyAsync(h.ID, dst, src, p.size, x.stream); err != nil {
			return err
		}
		part += cuda.Ptr(p.size)
	}
	return h.Driver.EventRecord(h.ID, ev, x.stream)
}
