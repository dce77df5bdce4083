package replay

import "testing"

// The odds of a run that failed at event 7, and of one that did not.
func TestOdds(t *testing.T) {
	at := func(i int) *int { return &i }
	met := &Result{Completed: true, PeakReserved: 30}
	failed := &Result{Completed: true, PeakReserved: 20, FailedOOMs: []int{7}}
	died := &Result{PeakReserved: 10, FailedEvent: at(7)}
	before := &Result{PeakReserved: 5, FailedEvent: at(3)}
	over := &Result{Completed: true, PeakReserved: 41, Capacity: 40}
	all := []*Result{met, failed, died, before, over}
	of := func(fatal int) Odds { return OddsOf(all, fatal, func(r *Result) bool { return r.Survived(fatal) }) }
	if got, want := of(7), (Odds{5, 1, 2, 5, 20, 41}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got, want := of(-1), (Odds{5, 2, 3, 5, 20, 41}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestSure(t *testing.T) {
	for _, c := range []struct {
		survived, replays int
		sure              bool
	}{{32, 32, true}, {31, 32, true}, {30, 32, false}, {8, 8, true}, {7, 8, false}, {0, 0, false}} {
		o := Odds{Replays: c.replays, Survived: c.survived}
		if o.Sure() != c.sure || c.replays > 0 && (c.replays-c.survived <= MayFail(c.replays)) != c.sure {
			t.Errorf("%s: sure is %v", o, o.Sure())
		}
	}
	if o := (Odds{Replays: 32, AsRecorded: 2}); o.Unexplained(9) != "" {
		t.Error(o.Unexplained(9))
	}
	const want = "the model does not explain this run: a request failed at event 9, which 1 of 32 replays with its own settings repeat; nothing is recommended"
	if got := (Odds{Replays: 32, AsRecorded: 1}).Unexplained(9); got != want {
		t.Error(got)
	}
}
