package offload

import (
	"cmp"

	"github.com/cistern-gpu/cistern/cuda"
)

// PlaceInHost gives contents their places in host memory. Slabs that this adds get their memory in Save.
func (s *Store) PlaceInHost(list []*Contents) { place(list, s.staging.place) }

// Save queues copies of batches to host memory. All of that is page-locked, and all copies are queued, when it returns. After an
// error no copy is under way, unless the store is unsure.
func (s *Store) Save(batches []*Batch) error {
	stop := s.staging.fill()
	err := s.queueAll(batches)
	if err = cmp.Or(err, stop()); err != nil {
		s.health.Failed(err)
		_ = s.wait()
	}
	return err
}

func (s *Store) queueAll(batches []*Batch) error {
	for _, b := range batches {
		err := s.queue(b.host, true)
		if err == nil {
			b.done, err = s.timeline.Event()
		}
		if err == nil {
			err = s.health.Driver.EventRecord(s.health.ID, b.done, s.copies)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Saved waits for the copies of a batch that Save queued.
func (s *Store) Saved(b *Batch) error {
	return s.health.Failed(s.health.Driver.EventSynchronize(s.health.ID, b.done))
}

// QueueLoad queues copies of what a batch has in host memory, and reports whether there is any. Await waits for them, also after
// an error.
func (s *Store) QueueLoad(b *Batch) (queued bool, err error) {
	if len(b.host) == 0 {
		return false, nil
	}
	return true, s.health.Failed(s.queue(b.host, false))
}

// Load copies a batch back and waits for that. The contents keep their places.
func (s *Store) Load(b *Batch) error {
	queued, err := s.QueueLoad(b)
	if queued {
		err = cmp.Or(err, s.Await())
	}
	if err != nil {
		return err
	}
	return s.LoadFiles(b)
}

// queue queues copies of pieces to host memory, or from there: as few copies as possible. It waits for slabs that are being
// made.
func (s *Store) queue(pieces []piece, out bool) error {
	st, err := s.copyStream()
	if err != nil {
		return err
	}
	for i := 0; i < len(pieces); {
		x := pieces[i]
		for i++; i < len(pieces); i++ {
			y := &pieces[i]
			if y.slab != x.slab || y.addr != x.addr+x.size || y.at != x.at+x.size {
				break
			}
			x.size += y.size
		}
		base, err := x.slab.wait()
		if err != nil {
			return err
		}
		dst, src := base+cuda.Ptr(x.at), cuda.Ptr(x.addr)
		if !out {
			dst, src = src, dst
		}
		if err := s.health.Driver.MemcpyAsync(s.health.ID, dst, src, x.size, st); err != nil {
			return err
		}
	}
	return nil
}
