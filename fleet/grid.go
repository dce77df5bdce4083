package fleet

import "slices"

// Grid is what ranks held, step by step, as a picture has it: columns of steps, and for each rank a byte in each column, which is
// the share of the GPU's memory: 1 is nothing or little, 255 all of it, 0 where the rank did not get there.
type Grid struct {
	Steps     []int64  // the last of each column
	Reserved  [][]byte // by the allocator and outside of it; a row for each of Answer.Ranks
	Allocated [][]byte
	// Envelopes are the most, the median and the least of all ranks in each column, in bytes.
	ReservedEnvelope, AllocatedEnvelope [3][]uint64
}

// Grid makes a picture of at most so many columns.
func (a *Answer) Grid(most int) *Grid {
	g := &Grid{}
	every, last := int64(1), int64(0)
	for i := range a.Ranks {
		s := &a.Ranks[i].of.Device.Series
		every = max(every, s.Every)
		if n := s.Len(); n > 0 {
			last = max(last, s.Step[n-1])
		}
	}
	for (last+every-1)/every > int64(most) {
		every *= 2
	}
	columns := int((last + every - 1) / every)
	for i := range columns {
		g.Steps = append(g.Steps, min(last, int64(i+1)*every))
	}
	reserved, allocated := make([][]uint64, columns), make([][]uint64, columns)
	for i := range a.Ranks {
		r := a.Ranks[i].of
		s := &r.Device.Series
		rows := [2][]uint64{make([]uint64, columns), make([]uint64, columns)}
		for k := range s.Len() {
			at := int((s.Step[k] - 1) / every)
			rows[0][at] = max(rows[0][at], s.Reserved[k]+s.Outside[k])
			rows[1][at] = max(rows[1][at], s.Peak[k])
		}
		g.Reserved = append(g.Reserved, shares(rows[0], r.Device.Total))
		g.Allocated = append(g.Allocated, shares(rows[1], r.Device.Total))
		for k := range columns {
			if rows[0][k] > 0 {
				reserved[k] = append(reserved[k], rows[0][k])
				allocated[k] = append(allocated[k], rows[1][k])
			}
		}
	}
	g.ReservedEnvelope, g.AllocatedEnvelope = envelope(reserved), envelope(allocated)
	return g
}

// shares are bytes as shares of a total, in 255 steps.
func shares(row []uint64, total uint64) []byte {
	out := make([]byte, len(row))
	for i, n := range row {
		if n > 0 && total > 0 {
			out[i] = byte(1 + 254*min(1, float64(n)/float64(total)))
		}
	}
	return out
}

func envelope(columns [][]uint64) (e [3][]uint64) {
	for _, list := range columns {
		slices.Sort(list)
		for i := range e {
			v := uint64(0)
			if n := len(list); n > 0 {
				v = list[[3]int{n - 1, (n - 1) / 2, 0}[i]]
			}
			e[i] = append(e[i], v)
		}
	}
	return e
}
