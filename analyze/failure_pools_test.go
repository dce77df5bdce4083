package analyze

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/dump"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/resource"
)

// Failures in which more than the default pool and the device had a part, as the files of a process tell of them.

// written is the report on the file that a process writes of a request that failed.
func written(t *testing.T, r *engineRun, err error) *FailureReport {
	t.Helper()
	if !errors.As(err, &r.oom) {
		t.Fatalf("%v; want out of memory", err)
	}
	reporter := dump.Reporter{Allocator: r.a, Say: func(string) {}}
	if err := reporter.To(t.TempDir(), false); err != nil {
		t.Fatal(err)
	}
	f, err := open.File(reporter.OutOfMemory(r.oom, nil))
	if err != nil {
		t.Fatal(err)
	}
	x, err := ReportFailures(context.Background(), f.Traces[0], nil, RemedyOptions{GPULag: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	return x.Failures[0]
}

func newPool(t *testing.T, r *engineRun, o cistern.PoolOptions) cistern.Pool {
	t.Helper()
	p, err := r.dev.NewPoolWith(cistern.PoolID{0, 3}, o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The limit of the request's own pool was in the way: how much more is enough is exact, and nothing is advised that is not about
// the pool, or beside it about the device where that lacks the memory too.
func TestPoolLimit(t *testing.T) {
	for name, c := range map[string]struct {
		capacity uint64
		want     string
	}{
		"alone":      {512 * mib, "A limit of 118.00 MiB for the pool is enough; or 18.00 MiB less in use in the pool."},
		"and device": {206 * mib, "A limit of 118.00 MiB for the pool is enough, together with 12.00 MiB less in use elsewhere, as the device, or a limit on all of it, had no more; or 18.00 MiB less in use in the pool."},
	} {
		r := newEngineRun(t, "", c.capacity)
		pool := newPool(t, r, cistern.PoolOptions{Limit: 100 * mib})
		for range 10 {
			if _, err := pool.Alloc(9*mib+mib/2, r.st); err != nil {
				t.Fatal(err)
			}
		}
		other := r.alloc(100*mib, 1)
		fails := func() error {
			_, err := pool.Alloc(22*mib, r.st)
			return err
		}
		x := written(t, r, fails())
		if x.Advice != c.want || len(x.Remedies) > 0 || len(x.Tried) > 0 || x.Shortage != 0 || !strings.Contains(x.Sentence, "the limit of its pool was in the way") {
			t.Errorf("%s: %q\nwant %q; %q, %d missing", name, x.Advice, c.want, x.Sentence, x.Shortage)
		}
		// As is said.
		pool.SetLimit(118 * mib)
		if err := fails(); (err == nil) != (name == "alone") {
			t.Errorf("%s: with the limit alone: %v", name, err)
		}
		if name == "and device" {
			if err := r.a.Free(other); err != nil {
				t.Fatal(err)
			}
			if err := fails(); err != nil {
				t.Errorf("with less held elsewhere: %v", err)
			}
		}
	}
}

// Without a history the limit of the pool is known all the same; a setting that turned it off is named.
func TestPoolLimitWithoutHistory(t *testing.T) {
	r := newEngineRun(t, "history:0,report:here", 512*mib)
	r.dev.SetHistory(0)
	pool := newPool(t, r, cistern.PoolOptions{Limit: 10 * mib})
	_, err := pool.Alloc(12*mib, r.st)
	if x := written(t, r, err); x.Advice != "A limit of 12.00 MiB for the pool is enough." || x.Event != -1 {
		t.Errorf("%q, event %d", x.Advice, x.Event)
	}
	_, err = r.dev.Alloc(600*mib, r.st)
	if x := written(t, r, err); !strings.Contains(x.Unsearched, "take history:0 out of CISTERN_CONF") {
		t.Errorf("%q", x.Unsearched)
	}
}

// What is paused is no memory of the device's: it is not in the way, and a replay, which knows no pauses, is not asked.
func TestPausedWhenItFailed(t *testing.T) {
	r := newEngineRun(t, "limit:100MiB", 512*mib)
	pool := newPool(t, r, cistern.PoolOptions{})
	if _, err := pool.Alloc(60*mib, r.st); err != nil {
		t.Fatal(err)
	}
	if _, err := r.dev.Pause(cistern.Selection{Pool: pool}, cistern.PauseOptions{}); err != nil {
		t.Fatal(err)
	}
	r.alloc(50*mib, 1)
	_, err := r.dev.Alloc(70*mib, r.st)
	x := written(t, r, err)
	if x.Searched || !strings.Contains(x.Unsearched, "60.00 MiB were paused") || x.Shortage != 20*mib || x.Paused != 60*mib || !strings.Contains(x.Sentence, "a limit was in the way") {
		t.Errorf("searched: %v, %q; %d missing, %q", x.Searched, x.Unsearched, x.Shortage, x.Sentence)
	}
}

// Memory of the host in a pool takes nothing from the device, neither in the figures nor in replays.
func TestPoolsElsewhere(t *testing.T) {
	r := newEngineRun(t, "limit:100MiB,stages:grow", 512*mib)
	host := newPool(t, r, cistern.PoolOptions{Upstream: resource.Pinned(r.a.Driver(), 0)})
	if _, err := host.Alloc(400*mib, r.st); err != nil {
		t.Fatal(err)
	}
	var live []func()
	for i := range 24 {
		p := r.alloc(4*mib, i%3)
		if i%2 == 0 {
			live = append(live, func() {
				if err := r.a.Free(p); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
	for _, free := range live {
		free()
	}
	_, err := r.dev.Alloc(30*mib, r.st)
	x := written(t, r, err)
	if x.Capacity != 100*mib || x.Shortage != 0 || x.Cause != CauseFragmentation {
		t.Errorf("%d available, %d missing, %s: %v", x.Capacity, x.Shortage, x.Cause, x.Why)
	}
	if !x.Searched || !x.Reproduced || len(x.Remedies) == 0 || x.Remedies[0].Do != "export CISTERN_CONF=limit:104857600" {
		t.Errorf("searched: %v, %q; reproduced: %v; %+v", x.Searched, x.Unsearched, x.Reproduced, x.Remedies)
	}
	if x.Remedies[0].Peak > 100*mib {
		t.Errorf("%+v", x.Remedies[0])
	}
}

// A program that was stopped for a moment: where the GPU was known to be far behind the host, chunks that move would be late in the
// replay from there on, and it would end a little earlier than the run did.
func TestFailureAfterAStop(t *testing.T) {
	for stop := 30; stop < 36; stop++ {
		r := newEngineRun(t, "limit:200MiB", 1<<30)
		r.dev.SetHistoryClock(func() int64 {
			r.us += 3
			return r.us
		})
		for leaked := 0; r.oom == nil; leaked++ {
			var step []cuda.Ptr
			for i := range 12 {
				step = append(step, r.alloc(uint64(3+i%5)*mib+uint64(leaked)*4096, 1))
			}
			r.alloc(700<<10, 2) // and stays
			for _, p := range step {
				r.free(p)
			}
			if leaked == stop {
				r.us += 11_000
			}
		}
		x := written(t, r, r.oom)
		if !x.Reproduced || x.Caveat != "" {
			t.Errorf("stopped after step %d: reproduced %v, %q", stop, x.Reproduced, x.Caveat)
		}
	}
}
