package journal

import (
	"math/rand/v2"
	"testing"
)

// Numbers against a plain list of what has them: the lowest that is free is given, and the tables end with the last in use.
func TestNumbers(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	var n Numbers
	used := map[int]bool{}
	for step := range 20_000 {
		if grow := step/2000%2 == 0; len(used) == 0 || rng.IntN(10) < 3 == !grow {
			least := 0
			for used[least] {
				least++
			}
			if i := n.Take(); i != least {
				t.Fatalf("step %d: %d is given, %d is free", step, i, least)
			}
			used[least] = true
		} else {
			k := rng.IntN(len(used))
			for i := range used {
				if k--; k < 0 {
					n.Put(i)
					delete(used, i)
					break
				}
			}
		}
		top := 0
		for i := range used {
			top = max(top, i+1)
		}
		if n.count != top || len(n.free) != (top+63)/64 {
			t.Fatalf("step %d: %d numbers in %d words, want %d", step, n.count, len(n.free), top)
		}
	}
}

// A number that an event has is given again only when the event cannot be read any more, whatever went before it.
func TestNamedNumbers(t *testing.T) {
	var n Names
	for i := range 4 {
		if got := n.take(1); got != i {
			t.Fatalf("%d, want %d", got, i)
		}
	}
	n.note(0, 7)
	n.note(2, 5)
	n.note(^uint32(0), 9) // of no stream
	n.put(2, 1)
	n.put(0, 1)
	n.put(1, 1)
	for _, x := range []struct{ oldest, want uint64 }{{5, 4}, {6, 2}, {7, 5}, {8, 0}, {8, 1}, {8, 6}} {
		if got := n.take(x.oldest); got != int(x.want) {
			t.Errorf("while event %d can be read, %d is given, want %d", x.oldest, got, x.want)
		}
	}
}
