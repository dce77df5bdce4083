package analyze

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/replay"
)

// runsThatDied are runs in which a request failed: those recorded on a GPU, and recorded ones shortened by a limit, in several draws.
func runsThatDied(t *testing.T) map[string]*recording.Trace {
	t.Helper()
	all := map[string]*recording.Trace{}
	if folder := os.Getenv("CISTERN_TRACES"); folder != "" {
		files, err := filepath.Glob(filepath.Join(folder, "*.pickle.gz"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no recordings in %s: %v", folder, err)
		}
		for _, file := range files {
			f, err := open.File(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, tr := range f.Traces {
				if _, ok := tr.FailedAt(); ok {
					all[filepath.Base(file)] = tr
				}
			}
		}
	}
	for _, tr := range smallTraces(t) {
		if testing.Short() && len(tr.Events) > 20_000 {
			continue
		}
		least, _ := tr.PeakLive()
		for _, c := range []struct {
			conf     string
			draw     int
			capacity uint64
		}{{"default", 1, least + 32<<20}, {"expandable_segments:True", 3, least + 8<<20}} {
			if testing.Short() && c.conf == "default" {
				continue // under the race detector one run takes half a minute
			}
			rec := &replay.Recording{}
			r, err := replay.Run(tr, replay.Spec{Name: "torch", Conf: c.conf, HasConf: true}, replay.Options{Capacity: c.capacity, Draw: c.draw, Record: rec})
			if err != nil {
				t.Fatal(err)
			}
			if !r.Completed {
				all[filepath.Base(tr.Path)+", "+c.conf] = rec.Trace()
			}
		}
	}
	if len(all) < 5 && !testing.Short() {
		t.Fatalf("only %d runs died", len(all))
	}
	return all
}

// tune, report and replay say the same of a run that died: how often its settings survive, what survives in their place, and how
// much memory each needs. Nothing is recommended that does not hold, or with a limit at which the run died.
func TestAnswersAgree(t *testing.T) {
	const lag = 20 * time.Millisecond
	ctx := context.Background()
	for name, tr := range runsThatDied(t) {
		t.Run(name, func(t *testing.T) {
			tn, err := Tune(ctx, tr, TuneOptions{GPULag: lag})
			if err != nil {
				t.Fatal(err)
			}
			failures, err := ReportFailures(ctx, tr, nil, RemedyOptions{GPULag: lag})
			if err != nil {
				t.Fatal(err)
			}
			x := failures.Failures[len(failures.Failures)-1]
			specs := []replay.Spec{{Name: "torch"}}
			rep, err := replay.Replay(tr, specs, replay.Options{GPULag: lag})
			steps, last := map[int]bool{}, 0
			if err == nil {
				err = Judge(ctx, tr, rep, specs, TuneOptions{GPULag: lag, Progress: func(done, total int) {
					steps[done], last = true, total-done
				}})
			}
			if err != nil {
				t.Fatal(err)
			}
			if last != 0 || len(steps) < replay.FewDraws {
				t.Errorf("progress in %d steps, %d short of its end", len(steps), last)
			}
			own := rep.Results[0]
			for _, c := range tn.Choices {
				if c.Result.CapacityFrom != tn.CapacityFrom {
					t.Errorf("%s: a limit from %q, the search's is from %q", c.AllocConf, c.Result.CapacityFrom, tn.CapacityFrom)
				}
			}
			if tn.Capacity != x.Capacity || own.Capacity != x.Capacity || tn.More != x.More {
				t.Errorf("limits of %d, %d and %d; %d and %d more", tn.Capacity, x.Capacity, own.Capacity, tn.More, x.More)
			}
			if *tn.Own.Result.Odds != x.Own.Odds || *own.Odds != x.Own.Odds {
				t.Errorf("the run's own settings survive %s, %s and %s", tn.Own.Result.Odds, x.Own.Odds, own.Odds)
			}
			if own.OOMs == 0 || tn.Own.Result.OOMs == 0 || !x.Reproduced {
				t.Errorf("the failure is not repeated: %d, %v, %v", own.OOMs, tn.Own.Result.OOMs, x.Reproduced)
			}
			if tn.Warning != x.Warning || rep.Warning != x.Warning {
				t.Errorf("warnings %q, %q and %q", tn.Warning, x.Warning, rep.Warning)
			}
			if tn.Warning != "" {
				if tn.Best != nil || len(x.Remedies) > 0 {
					t.Errorf("something is recommended: %+v, %+v", tn.Best, x.Remedies)
				}
				return
			}
			agree(t, tn, x)
		})
	}
}

// agree compares what two searches recommend.
func agree(t *testing.T, tn *Tuning, x *FailureReport) {
	t.Helper()
	var best *Remedy
	for i := range x.Remedies {
		m := &x.Remedies[i]
		if !m.Odds.Sure() || m.Odds.Replays < replay.FewDraws || m.Peak > m.Capacity {
			t.Errorf("%s survives %s with a peak of %d in %d", m.Title, m.Odds, m.Peak, m.Capacity)
		}
		if m.Kind == RemedySetting && best == nil {
			best = m
		}
	}
	switch {
	case (tn.Best == nil) != (best == nil):
		t.Fatalf("the best are %+v and %+v", tn.Best, best)
	case best != nil && (canonical(best.Conf) != tn.Best.AllocConf || best.Odds != *tn.Best.Result.Odds):
		t.Errorf("the best are %q, %s, and %q, %s", tn.Best.AllocConf, tn.Best.Result.Odds, best.Conf, best.Odds)
	}
	floor := func(all []Floor, who string) (f Floor) {
		for _, f = range all {
			if f.Who == who {
				return f
			}
		}
		return Floor{}
	}
	a, b := floor(tn.Floors, "own"), floor(x.Floors, "the run's own settings")
	if a.Capacity != b.Capacity || a.Capacity != 0 && a.Capacity <= tn.Capacity-tn.Capacity/floorPart {
		t.Errorf("the run's own settings need %d and %d; it died with %d", a.Capacity, b.Capacity, tn.Capacity)
	}
	if best != nil {
		if f := floor(tn.Floors, "best"); f.Capacity != best.Floor || f.Capacity > tn.Capacity {
			t.Errorf("the best settings need %d and %d, of %d", f.Capacity, best.Floor, tn.Capacity)
		}
	}
}

// A run whose failure no replay repeats gets no advice from any command, and is told why.
func TestUnexplainedRun(t *testing.T) {
	tr := *smallTraces(t)[1]
	tr.Events = append(slices.Clone(tr.Events[:20_000]), event.Event{Kind: event.OOM, Size: 512, Addr: 1 << 30, TimeUS: tr.Events[20_000].TimeUS})
	ctx := context.Background()
	tn, err := Tune(ctx, &tr, TuneOptions{})
	if err != nil {
		t.Fatal(err)
	}
	failures, err := ReportFailures(ctx, &tr, nil, RemedyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	x := failures.Failures[0]
	specs := []replay.Spec{{Name: "torch"}, {Name: "direct"}}
	rep, err := replay.Replay(&tr, specs, replay.Options{})
	if err == nil {
		err = Judge(ctx, &tr, rep, specs, TuneOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	const want = "the model does not explain this run: a request failed at event 20000, which 0 of 32 replays with its own settings repeat; nothing is recommended"
	if tn.Warning != want || x.Warning != want || rep.Warning != want {
		t.Errorf("%q, %q, %q", tn.Warning, x.Warning, rep.Warning)
	}
	if tn.Best != nil || len(tn.Floors) != 0 || len(x.Remedies) != 0 || !strings.Contains(x.Sentence, "the model does not explain this run") {
		t.Errorf("best %+v, floors %+v, remedies %+v, %s", tn.Best, tn.Floors, x.Remedies, x.Sentence)
	}
}

// Of a failure that no event tells of there is nothing to replay: the run itself is answered for.
func TestTuneSilentFailure(t *testing.T) {
	tr := *smallTraces(t)[2]
	tr.Failures = []*recording.Failure{{Event: -1, Requested: 1 << 30}}
	with, err := Tune(context.Background(), &tr, TuneOptions{Capacity: 30 << 30})
	if err != nil {
		t.Fatal(err)
	}
	tr.Failures = nil
	without, err := Tune(context.Background(), &tr, TuneOptions{Capacity: 30 << 30})
	if err != nil {
		t.Fatal(err)
	}
	if with.More != 0 || *with.Own.Result.Odds != *without.Own.Result.Odds || with.Best.AllocConf != without.Best.AllocConf {
		t.Errorf("%d more, own %s, best %q; without %s, %q", with.More, with.Own.Result.Odds, with.Best.AllocConf, without.Own.Result.Odds,
			without.Best.AllocConf)
	}
}

// A budget that is used up at once leaves the run's own settings and says why there is no more.
func TestTuneWithoutTime(t *testing.T) {
	tn, err := Tune(context.Background(), smallTraces(t)[2], TuneOptions{Budget: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	const note = "the search was cut short: the time for replays (--budget 1ns) was used up"
	if tn.Own == nil || tn.Own.Result.PeakReserved == 0 || tn.Best != nil || tn.Why == "" || !slices.Contains(tn.Notes, note) {
		t.Errorf("%+v", tn)
	}
}
