package leaves

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// A list does what a slice does.
func TestList(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var l List[int]
	var want []int
	for range 50_000 {
		x := r.IntN(3000)
		p := l.Search(func(y *int) bool { return *y >= x })
		i, _ := slices.BinarySearch(want, x)
		if at := l.At(p); (at == nil) != (i == len(want)) || at != nil && *at != want[i] {
			t.Fatalf("place of %d: %v; expected element %d", x, at, i)
		}
		if b, ok := l.Before(p); ok != (i > 0) || ok && *l.At(b) != want[i-1] {
			t.Fatalf("before %d", x)
		}
		if at := l.At(p); at != nil && r.IntN(20) < 9 {
			next := l.Delete(p)
			want = slices.Delete(want, i, i+1)
			if at := l.At(next); (at == nil) != (i == len(want)) || at != nil && *at != want[i] {
				t.Fatalf("behind what was deleted: %v", at)
			}
		} else {
			l.Insert(p, x)
			want = slices.Insert(want, i, x)
		}
		if l.Len() != len(want) {
			t.Fatalf("%d elements; expected %d", l.Len(), len(want))
		}
	}
	var got []int
	for x := range l.All() {
		got = append(got, *x)
	}
	if !slices.Equal(got, want) {
		t.Fatal("other elements, or in another order")
	}
}
