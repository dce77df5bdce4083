package trace

import (
	"encoding/binary"
	"math"

	"github.com/cistern-gpu/cistern/internal/text"
)

// cursor reads a payload. The first read beyond its end makes bad, and every later one returns 0.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) u() uint64 {
	if len(c.b) > 0 && c.b[0] < 0x80 {
		n := uint64(c.b[0])
		c.b = c.b[1:]
		return n
	}
	n, k := binary.Uvarint(c.b)
	if k <= 0 {
		c.bad, c.b = true, nil
		return 0
	}
	c.b = c.b[k:]
	return n
}

func (c *cursor) i() int64 {
	n := c.u()
	return int64(n>>1) ^ -int64(n&1)
}

func (c *cursor) u8() byte {
	if len(c.b) == 0 {
		c.bad = true
		return 0
	}
	n := c.b[0]
	c.b = c.b[1:]
	return n
}

func (c *cursor) u64() uint64 {
	if len(c.b) < 8 {
		c.bad, c.b = true, nil
		return 0
	}
	n := binary.LittleEndian.Uint64(c.b)
	c.b = c.b[8:]
	return n
}

// text is bytes that are to be shown.
func (c *cursor) text() string { return text.Clean(string(c.bytes())) }

func (c *cursor) bytes() []byte {
	n := c.u()
	if n > uint64(len(c.b)) {
		c.bad, c.b = true, nil
		return nil
	}
	s := c.b[:n:n]
	c.b = c.b[n:]
	return s
}

// index is an index that must be below n.
func (c *cursor) index(n int) int {
	i := c.u()
	if i >= uint64(n) {
		c.bad, c.b = true, nil
		return 0
	}
	return int(i)
}

// ref is a 32-bit index of something that finish checks.
func (c *cursor) ref() uint32 {
	i := c.u()
	if i > math.MaxUint32 {
		c.bad = true
	}
	return uint32(i)
}

// count is a number of entries of at least size bytes each.
func (c *cursor) count(size int) int {
	n := c.u()
	if n > uint64(len(c.b)/size) {
		c.bad, c.b = true, nil
		return 0
	}
	return int(n)
}
