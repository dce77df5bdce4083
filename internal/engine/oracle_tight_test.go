package engine_test

import "time"

// Random sequences in which the limits of pools and of the device, chunks of many sizes, streams and captures meet: in a
// device of which much is held, so that chunks are as large as requests, a few streams share a few pools, and limits are set
// to what is held.

// filler is what a device has in use, so that chunks are large.
const filler = 4 * gib

func tight(c setup) setup {
	c.tight, c.devices, c.capacity = true, 1, 96*gib
	c.lag = min(c.lag, 20*time.Millisecond)
	return c
}

// opTight is op, most of the time around limits.
func (w *world) opTight(d *worldDevice) {
	if d.now.allocated < filler {
		w.setLimit(d, 0)
		w.alloc(d, filler, d.streams[0])
	}
	for len(d.pools) < 2 {
		w.newPool(d)
	}
	switch n := w.rng.IntN(100); {
	case n < 40:
		w.alloc(d, uint64(1+w.rng.IntN(20))*mib*uint64(1+w.rng.IntN(2)), d.streams[w.rng.IntN(min(3, len(d.streams)))])
	case n < 70:
		if i := w.rng.IntN(max(len(d.blocks), 1)); i < len(d.blocks) && (d.blocks[i].size != filler || w.chance(1)) {
			w.free(d, i)
		}
	case n < 75:
		w.trim(d)
	case n < 83:
		limit := uint64(0)
		if w.chance(70) {
			limit = w.drv.ReservedBytes(d.id) + uint64(w.rng.IntN(2)*w.rng.IntN(8))*mib
		}
		w.setLimit(d, limit)
	case n < 90:
		p, limit := pick(w, d.pools), uint64(0)
		if w.chance(80) {
			limit = w.poolHolds(p) + uint64(w.rng.IntN(40))*mib
		}
		w.setPoolLimit(p, limit)
	default:
		w.op(d)
	}
}
