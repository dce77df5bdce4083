package replay

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording/open"
)

// What a plan remembers of a limit is what it would infer again: of each limit, in any order, and of a trace that ends earlier.
func TestReleasesAreRemembered(t *testing.T) {
	f, err := open.File(filepath.Join("..", "recording", "testdata", "detection.pickle.gz"))
	if err != nil {
		t.Fatal(err)
	}
	tr := f.Traces[0]
	for i := 0; i < len(tr.Events); i += 400 { // the program empties its cache now and then, as far as the record says
		if e := &tr.Events[i]; e.Kind == event.SegmentAlloc {
			tr.Events = slices.Insert(tr.Events, i+1, event.Event{Kind: event.SegmentFree, Addr: e.Addr, Size: e.Size, TimeUS: e.TimeUS})
		}
	}
	plan := NewPlan(tr)
	peak := plan.Recorded.PeakReserved
	text := func(p *Plan) string { return fmt.Sprint(p.Releases, p.Notes, p.pools, len(p.Pools)) }
	seen := map[string]bool{}
	for _, limit := range []uint64{0, peak, 1, peak + 1<<30, peak / 2, 2 * peak, 3 * peak, 4 * peak, peak, 0, 4 * peak} {
		got, want := text(plan.withReleases(limit)), text(NewPlan(tr).withReleases(limit))
		if got != want {
			t.Errorf("limit %d: %.300s; expected %.300s", limit, got, want)
		}
		seen[got] = true
	}
	short := *tr
	short.Events = tr.Events[:len(tr.Events)/2]
	if got, want := len(plan.With(&short).withReleases(0).Releases), len(NewPlan(&short).withReleases(0).Releases); got != want {
		t.Errorf("%d releases of the first half; expected %d", got, want)
	}
	if n := len(plan.withReleases(0).Releases); n == 0 {
		t.Error("the record shows no release")
	}
}
