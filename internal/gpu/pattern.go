package gpu

import "encoding/binary"

// golden is 2^64 divided by the golden ratio: steps of it fall evenly over all words.
const golden = 0x9E3779B97F4A7C15

// mix is the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// Word is the pattern's word number i for a seed: what Fill writes at byte 8×i, lowest byte first. The seed is mixed
// first, so that the patterns of seeds that lie close are not shifted copies of each other.
func Word(seed, i uint64) uint64 { return mix(mix(seed) + i*golden) }

// Pattern writes to p what Fill writes to a range as long.
func Pattern(p []byte, seed uint64) { pattern(p, seed, 0) }

// pattern writes the words from number first on.
func pattern(p []byte, seed, first uint64) {
	var word [8]byte
	for i := 0; i*8 < len(p); i++ {
		binary.LittleEndian.PutUint64(word[:], Word(seed, first+uint64(i)))
		copy(p[i*8:], word[:])
	}
}
