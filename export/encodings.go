package export

import (
	"encoding/binary"
	"math/bits"
)

// Encodings of Parquet's pages, as Encodings.md in parquet-format describes them.

// appendPacked appends n values of width bits each, the first in the lowest bits.
func appendPacked(b []byte, width, n int, value func(i int) uint64) []byte {
	var acc uint64
	have := 0
	for i := range n {
		v := value(i)
		acc |= v << have
		have += width
		for have >= 64 {
			b = binary.LittleEndian.AppendUint64(b, acc)
			have -= 64
			acc = 0
			if width > have {
				acc = v >> (width - have)
			}
		}
	}
	for ; have > 0; have -= 8 {
		b = append(b, byte(acc))
		acc >>= 8
	}
	return b
}

// appendHybrid appends values as one run: repeated where they are all the same, bit-packed in eights otherwise.
func appendHybrid(b []byte, width, n int, value func(i int) uint64) []byte {
	if n == 0 {
		return b
	}
	first, same := value(0), true
	for i := 1; i < n && same; i++ {
		same = value(i) == first
	}
	if same {
		b = binary.AppendUvarint(b, uint64(n)<<1)
		for k := 0; k < width; k += 8 {
			b = append(b, byte(first>>k))
		}
		return b
	}
	eights := (n + 7) / 8
	b = binary.AppendUvarint(b, uint64(eights)<<1|1)
	return appendPacked(b, width, eights*8, func(i int) uint64 {
		if i < n {
			return value(i)
		}
		return 0
	})
}

const (
	deltaBlock = 128
	deltaMini  = 32
)

// appendDelta appends numbers as differences (DELTA_BINARY_PACKED): blocks of 128, each with its least difference and
// four miniblocks with a width of their own.
func appendDelta(b []byte, values []uint64) []byte {
	b = binary.AppendUvarint(b, deltaBlock)
	b = binary.AppendUvarint(b, deltaBlock/deltaMini)
	b = binary.AppendUvarint(b, uint64(len(values)))
	if len(values) == 0 {
		return binary.AppendVarint(b, 0)
	}
	b = binary.AppendVarint(b, int64(values[0]))
	var deltas [deltaBlock]uint64
	for at := 1; at < len(values); at += deltaBlock {
		n := min(deltaBlock, len(values)-at)
		least := int64(values[at] - values[at-1])
		for i := range n {
			deltas[i] = values[at+i] - values[at+i-1]
			least = min(least, int64(deltas[i]))
		}
		clear(deltas[n:])
		b = binary.AppendVarint(b, least)
		widths := len(b)
		b = append(b, 0, 0, 0, 0)
		for m := 0; m*deltaMini < n; m++ {
			mini := deltas[m*deltaMini : (m+1)*deltaMini]
			var all uint64
			for i := range mini {
				if m*deltaMini+i < n {
					mini[i] -= uint64(least)
				}
				all |= mini[i]
			}
			width := bits.Len64(all)
			b[widths+m] = byte(width)
			b = appendPacked(b, width, deltaMini, func(i int) uint64 { return mini[i] })
		}
	}
	return b
}
