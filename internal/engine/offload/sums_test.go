package offload

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
)

// TestFileSums: of contents written in pieces, any range is known to be right, and to be wrong with one bit changed.
func TestFileSums(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	file := make([]byte, 5*sumUnit+1536)
	for i := range file {
		file[i] = byte(r.Uint32())
	}
	var s fileSums
	for at := 0; at < len(file); {
		n := min(512*(1+r.IntN(300)), len(file)-at)
		s.add(file[at:at+n], uint64(at))
		at += n
	}
	for _, u := range s.units {
		if u.bytes == sumUnknown {
			t.Fatal("a unit that was written in order has no checksum")
		}
	}
	for range 200 {
		from := 512 * r.IntN(len(file)/512)
		to := from + 512*(1+r.IntN((len(file)-from)/512))
		read := bytes.Clone(file[from:to])
		if err := s.check(read, uint64(from), bytes.NewReader(file)); err != nil {
			t.Fatalf("[%d, %d): %v", from, to, err)
		}
		at := r.IntN(len(read))
		read[at] ^= 1 << r.IntN(8)
		changed := bytes.Clone(file)
		changed[from+at] = read[at]
		for what, now := range map[string][]byte{"when it was read": file, "since": changed} {
			if err := s.check(read, uint64(from), bytes.NewReader(now)); !errors.Is(err, errChanged) {
				t.Fatalf("[%d, %d) with byte %d changed %s: %v", from, to, at, what, err)
			}
		}
	}
	s.add(file[512:1024], 512) // written again, not from the unit's start
	if s.units[0].bytes != sumUnknown {
		t.Error("a unit that was not written in order has a checksum")
	}
}

func BenchmarkFileSums(b *testing.B) {
	data := make([]byte, partSize)
	var s fileSums
	b.SetBytes(partSize)
	for b.Loop() {
		s.add(data, 0)
	}
}
