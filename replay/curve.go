package replay

// Curve is memory over time. Every point stands for an equal part of the events and holds the highest values seen in
// it, so that no peak is lost. The slices are of equal length.
type Curve struct {
	TimeUS    []int64  // microseconds since the first event, of the point's highest reserved
	Live      []uint64 // requested bytes not yet returned for reuse
	Allocated []uint64 // bytes handed out, as rounded by the allocator
	Reserved  []uint64 // bytes held from the driver
}

// curver collects a Curve.
type curver struct {
	c     Curve
	every int // calls per point
	n     int // calls so far
}

func newCurver(samples, events int) *curver {
	return &curver{every: max(1, events*2/3/samples)}
}

func (c *curver) add(us int64, live, allocated, reserved uint64) {
	if c.n%c.every == 0 {
		c.c.TimeUS = append(c.c.TimeUS, us)
		c.c.Live = append(c.c.Live, live)
		c.c.Allocated = append(c.c.Allocated, allocated)
		c.c.Reserved = append(c.c.Reserved, reserved)
		c.n++
		return
	}
	c.n++
	i := len(c.c.TimeUS) - 1
	if reserved > c.c.Reserved[i] {
		c.c.TimeUS[i], c.c.Reserved[i] = us, reserved
	}
	c.c.Live[i] = max(c.c.Live[i], live)
	c.c.Allocated[i] = max(c.c.Allocated[i], allocated)
}

func (c *curver) points() Curve {
	if c == nil {
		return Curve{}
	}
	return c.c
}
