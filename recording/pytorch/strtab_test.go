package pytorch

import (
	"fmt"
	"testing"

	"github.com/cistern-gpu/cistern/recording/internal/input"
)

// strtab gives equal strings equal ids, and every id its string.
func TestStrtab(t *testing.T) {
	tab := newStrtab(input.NewBudget(plenty, plenty))
	ids := map[string]uint32{}
	for i := range 100_000 {
		s := fmt.Sprint("s", i*7919%30_000)
		if i%1000 == 0 {
			s = string(make([]byte, i*3)) // longer than a piece, and empty
		}
		id, err := tab.id([]byte(s))
		if err != nil {
			t.Fatal(err)
		}
		if w, ok := ids[s]; ok && w != id {
			t.Fatalf("%q has ids %d and %d", input.Clip([]byte(s)), w, id)
		}
		ids[s] = id
	}
	for s, id := range ids {
		if got := tab.get(uint64(id)); string(got) != s {
			t.Fatalf("id %d is %q; expected %q", id, input.Clip(got), input.Clip([]byte(s)))
		}
	}
}
func plenty() int64 { return 1 << 40 }
