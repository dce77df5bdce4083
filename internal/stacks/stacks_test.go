package stacks

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// random is a stack that few others are like: common outer frames, other inner ones.
func random(rng *rand.Rand, places int) []uint64 {
	f := make([]uint64, 1+rng.IntN(40))
	for i := range f {
		f[i] = uint64(0x400000 + i<<8 + rng.IntN(places))
	}
	return f
}

// Equal frames have the same number, others another one, and a number leads back to its frames.
func TestNumbers(t *testing.T) {
	var table Table
	rng := rand.New(rand.NewPCG(1, 2))
	numbers := map[string]uint32{}
	var all [][]uint64
	for range 50_000 {
		f := random(rng, 1+rng.IntN(3))
		key := text(f)
		n := table.Of(f)
		want, known := numbers[key]
		if !known {
			want = uint32(len(numbers) + 1)
			numbers[key] = want
			all = append(all, f)
		}
		if n != want {
			t.Fatalf("stack %v has number %d, want %d", f, n, want)
		}
	}
	bytes := uint64(0)
	for i, f := range all {
		if got := table.Frames(uint32(i + 1)); !slices.Equal(got, f) {
			t.Fatalf("number %d leads to %v, want %v", i+1, got, f)
		}
		bytes += 8 * uint64(len(f))
	}
	if u := table.Usage(); u != (Usage{Stacks: len(all), Bytes: bytes}) || len(all) < 1000 {
		t.Errorf("%+v, want %d stacks of %d bytes", u, len(all), bytes)
	}
}

func text(f []uint64) string {
	var b []byte
	for _, x := range f {
		for ; x > 0; x >>= 8 {
			b = append(b, byte(x))
		}
		b = append(b, '/')
	}
	return string(b)
}

// What is no stack has no number, a number that was not given no frames, and what is too deep loses its outermost frames.
func TestEdges(t *testing.T) {
	var table Table
	if n := table.Of(nil); n != 0 || table.Frames(0) != nil || table.Frames(1) != nil || table.Frames(1<<31) != nil {
		t.Errorf("an empty table gives %d", n)
	}
	deep := make([]uint64, 3*MaxFrames)
	for i := range deep {
		deep[i] = uint64(i)
	}
	n := table.Of(deep)
	if got := table.Frames(n); !slices.Equal(got, deep[:MaxFrames]) {
		t.Errorf("%d frames of a deep stack are kept", len(got))
	}
	if m := table.Of(deep[:MaxFrames]); m != n {
		t.Errorf("the part of it that counts is number %d, want %d", m, n)
	}
	// Frames that are all 0, of several lengths.
	for i := 1; i < 100; i++ {
		if m := table.Of(make([]uint64, i)); m != n+uint32(i) {
			t.Fatalf("%d frames: number %d, want %d", i, m, n+uint32(i))
		}
	}
	// What the caller does with its frames afterwards changes nothing.
	f := []uint64{7, 8, 9}
	n = table.Of(f)
	f[0] = 1
	if got := table.Frames(n); got[0] != 7 {
		t.Error("the table shares memory with its caller")
	}
	if got := append(table.Frames(n), 5); table.Frames(n+1) != nil || len(got) != 4 {
		t.Error("frames can be appended to")
	}
}

// The table stops at its bounds: what is known stays known, and what is new is counted and has no number.
func TestFull(t *testing.T) {
	for name, frames := range map[string]int{"by number": 2, "by bytes": MaxFrames} {
		t.Run(name, func(t *testing.T) {
			var table Table
			f := make([]uint64, frames)
			given := 0
			for i := range uint64(MaxStacks + 10) {
				f[0] = i
				if table.Of(f) == 0 {
					break
				}
				given++
			}
			want := MaxStacks
			if frames == MaxFrames {
				want = MaxBytes / 8 / MaxFrames
			}
			if given != want {
				t.Errorf("%d stacks of %d frames have numbers, want %d", given, frames, want)
			}
			for i := range uint64(5) {
				f[0] = 1<<40 + i
				if n := table.Of(f); n != 0 {
					t.Errorf("a full table gives number %d", n)
				}
			}
			f[0] = 3
			if n := table.Of(f); n != 4 || !slices.Equal(table.Frames(n), f) {
				t.Errorf("a stack that is known has number %d, want 4", n)
			}
			if u := table.Usage(); u.Stacks != given || u.Bytes > MaxBytes || u.Lost != 6 {
				t.Errorf("%+v, want %d stacks and 6 lost", u, given)
			}
		})
	}
}

// Many threads that meet the same stacks at the same time agree on their numbers.
func TestThreads(t *testing.T) {
	var table Table
	const threads, distinct = 8, 4000
	numbers := make([][distinct]uint32, threads)
	var wg sync.WaitGroup
	for k := range threads {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(9, uint64(k)))
			for _, i := range rng.Perm(distinct) {
				f := []uint64{uint64(i), uint64(i % 7), 5}[:1+i%3]
				n := table.Of(f)
				numbers[k][i] = n
				if got := table.Frames(n); !slices.Equal(got, f) {
					t.Errorf("number %d leads to %v, want %v", n, got, f)
					return
				}
			}
		})
	}
	wg.Wait()
	seen := map[uint32]bool{}
	for i := range distinct {
		for k := range threads {
			if numbers[k][i] != numbers[0][i] {
				t.Fatalf("stack %d has numbers %d and %d", i, numbers[0][i], numbers[k][i])
			}
		}
		seen[numbers[0][i]] = true
	}
	if u := table.Usage(); len(seen) != distinct || u.Stacks != distinct || u.Lost != 0 {
		t.Errorf("%d numbers for %d stacks: %+v", len(seen), distinct, u)
	}
}

// What is known is found without Go memory.
func TestKnownIsFree(t *testing.T) {
	var table Table
	f := []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	table.Of(f)
	if n := testing.AllocsPerRun(1000, func() { table.Frames(table.Of(f)) }); n != 0 {
		t.Errorf("%v Go allocations", n)
	}
}

func BenchmarkKnown(b *testing.B) {
	var table Table
	rng := rand.New(rand.NewPCG(1, 2))
	var all [1024][]uint64
	for i := range all {
		all[i] = make([]uint64, 20)
		for k := range all[i] {
			all[i][k] = rng.Uint64()
		}
		table.Of(all[i])
	}
	b.RunParallel(func(p *testing.PB) {
		for i := 0; p.Next(); i++ {
			if table.Of(all[i&1023]) == 0 {
				b.Fail()
			}
		}
	})
}
