package main

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	bubbles "charm.land/bubbles/v2/progress"

	"github.com/cistern-gpu/cistern/recording"
)

// Where standard error is no terminal there is no bar, however long the work takes.
func TestNoBarWhenPiped(t *testing.T) {
	var errs bytes.Buffer
	a := &app{err: &errs}
	p := a.startProgress("replaying", 1)
	p.file(0, "x.pickle")(0.5)
	p.pause()
	p.resume()
	p.end()
	if errs.Len() > 0 {
		t.Errorf("wrote %q", errs.String())
	}
}

// The bar says how far all files are, never goes back, and leaves its line to the output.
func TestBar(t *testing.T) {
	var errs bytes.Buffer
	p := &progress{w: &errs, verb: "replaying", parts: make([]float64, 4), stop: make(chan struct{}), model: bubbles.New()}
	p.file(0, "dir/a.pickle")(1)
	p.file(1, "dir/b\x1b.pickle")(1)
	p.file(1, "dir/b\x1b.pickle")(0.2)
	p.draw()
	if got := errs.String(); !strings.Contains(got, "50%") || !strings.Contains(got, "2 of 4 files, replaying b\uFFFD.pickle") {
		t.Errorf("drew %q", got)
	}
	errs.Reset()
	p.pause()
	p.draw()
	if got := errs.String(); got != "\r\x1b[2K" {
		t.Errorf("a paused bar drew %q, want its line cleared only", got)
	}
}

// TestBarTellsTheRest: the bar has the time that the rest takes at the rate since the file was read, once enough is known.
func TestBarTellsTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var errs bytes.Buffer
		p := &progress{w: &errs, verb: "tuning", parts: make([]float64, 2), stop: make(chan struct{}), model: bubbles.New()}
		time.Sleep(time.Hour) // reading says nothing of what comes after it
		step := p.file(0, "a.pickle")
		for i, c := range []struct {
			sleep time.Duration
			part  float64
			want  string
		}{{0, 0.1, "tuning a.pickle"}, {time.Second, 0.15, "tuning a.pickle"}, {9 * time.Second, 0.3, "0 of 2 files, about 2 min left, tuning a.pickle"},
			{10 * time.Second, 0.9, "0 of 2 files, about 28 s left, tuning a.pickle"}, {time.Second, 1, "1 of 2 files, about 23 s left, tuning a.pickle"}} {
			time.Sleep(c.sleep)
			step(c.part)
			errs.Reset()
			if p.draw(); !strings.HasSuffix(errs.String(), c.want) {
				t.Errorf("%d: drew %q, want %q", i, errs.String(), c.want)
			}
		}
		p.file(1, "b.pickle")(1)
		errs.Reset()
		if p.draw(); strings.Contains(errs.String(), "left") {
			t.Errorf("at the end: drew %q", errs.String())
		}
	})
}

// Work that takes less than a second has no bar; after that it is drawn ten times a second, until the work ends.
func TestBarTimes(t *testing.T) {
	for _, c := range []struct {
		works time.Duration
		draws int
	}{{barDelay - time.Millisecond, 0}, {barDelay + time.Millisecond, 1}, {barDelay + 250*time.Millisecond, 3}} {
		synctest.Test(t, func(t *testing.T) {
			var errs bytes.Buffer
			p := &progress{w: &errs, verb: "replaying", parts: make([]float64, 1), stop: make(chan struct{}), model: bubbles.New()}
			p.ended.Go(p.run)
			time.Sleep(c.works)
			p.end()
			if got := strings.Count(errs.String(), "replaying"); got != c.draws {
				t.Errorf("%v of work: drawn %d times, want %d", c.works, got, c.draws)
			}
			time.Sleep(time.Minute)
			if got := strings.Count(errs.String(), "replaying"); got != c.draws {
				t.Error("drawn after its end")
			}
		})
	}
}

// A bar is over when the work on the files is, whatever is written or asked of it after that.
func TestBarEndsWithTheWork(t *testing.T) {
	inFolder(t)
	var errs bytes.Buffer
	a := &app{err: &errs}
	p := &progress{w: &errs, verb: "reading", parts: make([]float64, 1), stop: make(chan struct{}), model: bubbles.New()}
	p.ended.Go(p.run)
	read := func(f *recording.File, _ func(int, int)) (struct{}, error) { return struct{}{}, nil }
	if err := eachFile(t.Context(), a, []string{"tiny.pickle"}, p, read, func(int, outcome[struct{}]) {}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.stop:
	default:
		t.Error("the bar goes on")
	}
	p.end()
}
