package tables

import (
	"encoding/binary"
	"math"

	"github.com/cistern-gpu/cistern/internal/text"
)

// Cursor reads a payload. The first read beyond its end sets Bad, and every later one returns 0.
type Cursor struct {
	B   []byte
	Bad bool
}

// U is a varint.
func (c *Cursor) U() uint64 {
	if len(c.B) > 0 && c.B[0] < 0x80 {
		n := uint64(c.B[0])
		c.B = c.B[1:]
		return n
	}
	n, k := binary.Uvarint(c.B)
	if k <= 0 {
		c.Bad, c.B = true, nil
		return 0
	}
	c.B = c.B[k:]
	return n
}

// I is a signed varint.
func (c *Cursor) I() int64 {
	n := c.U()
	return int64(n>>1) ^ -int64(n&1)
}

// U8 is a byte.
func (c *Cursor) U8() byte {
	if len(c.B) == 0 {
		c.Bad = true
		return 0
	}
	n := c.B[0]
	c.B = c.B[1:]
	return n
}

// U64 is 8 bytes, little-endian.
func (c *Cursor) U64() uint64 {
	if len(c.B) < 8 {
		c.Bad, c.B = true, nil
		return 0
	}
	n := binary.LittleEndian.Uint64(c.B)
	c.B = c.B[8:]
	return n
}

// Text is bytes that are to be shown.
func (c *Cursor) Text() string { return text.Clean(string(c.Bytes())) }

// Bytes are as many bytes as the varint before them says.
func (c *Cursor) Bytes() []byte {
	n := c.U()
	if n > uint64(len(c.B)) {
		c.Bad, c.B = true, nil
		return nil
	}
	s := c.B[:n:n]
	c.B = c.B[n:]
	return s
}

// Index is an index that must be below n.
func (c *Cursor) Index(n int) int {
	i := c.U()
	if i >= uint64(n) {
		c.Bad, c.B = true, nil
		return 0
	}
	return int(i)
}

// Ref is a 32-bit index of something that is checked later.
func (c *Cursor) Ref() uint32 {
	i := c.U()
	if i > math.MaxUint32 {
		c.Bad = true
	}
	return uint32(i)
}

// Count is a number of entries of at least size bytes each.
func (c *Cursor) Count(size int) int {
	n := c.U()
	if n > uint64(len(c.B)/size) {
		c.Bad, c.B = true, nil
		return 0
	}
	return int(n)
}
