package main

import (
	"bytes"
	"strings"
	"testing"

	bubbles "charm.land/bubbles/v2/progress"
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
