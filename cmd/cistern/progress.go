package main

import (
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"time"

	bubbles "charm.land/bubbles/v2/progress"
	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
)

// barDelay is how long work may take before a bar is shown.
const barDelay = time.Second

// progress is a bar on the terminal, on the line below the output. It is shown once the work has taken a second, and
// never where standard error is no terminal.
type progress struct {
	w     io.Writer // nil: never shown
	model bubbles.Model
	verb  string
	plain bool // without colours
	stop  chan struct{}
	once  sync.Once // closes stop
	ended sync.WaitGroup

	mu     sync.Mutex // protects what follows, and w
	parts  []float64  // done of each file, 0 to 1
	since  time.Time  // when the first part of a file was done, from which on the rest is estimated
	from   float64    // what was done by then, of all files
	name   string     // the file that moved last
	shown  bool
	paused bool
}

// startProgress begins a bar over a number of files. verb says what is being done: "replaying".
func (a *app) startProgress(verb string, files int) *progress {
	p := &progress{verb: verb, parts: make([]float64, files), stop: make(chan struct{})}
	if !isTerminal(a.err) {
		return p
	}
	p.w = a.err
	p.plain = !a.color.wanted()
	p.model = bubbles.New(bubbles.WithWidth(32))
	p.ended.Go(p.run)
	return p
}

// run draws the bar ten times a second, from barDelay on.
func (p *progress) run() {
	select {
	case <-time.After(barDelay):
	case <-p.stop:
		return
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		p.draw()
		select {
		case <-tick.C:
		case <-p.stop:
			return
		}
	}
}

// file is the function that takes the progress of file i.
func (p *progress) file(i int, path string) func(float64) {
	return func(part float64) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.parts[i] = max(p.parts[i], part) // a search that finds more to do does not go back
		p.name = filepath.Base(path)
		if p.since.IsZero() {
			p.since = time.Now()
			p.from, _ = p.done()
		}
	}
}

// done is how much of all files is done, 0 to 1, and how many files are done. The caller holds mu.
func (p *progress) done() (part float64, files int) {
	for _, x := range p.parts {
		part += x
		if x == 1 {
			files++
		}
	}
	return part / float64(max(1, len(p.parts))), files
}

// leastKnown is the part of the work that has to be timed before the rest is estimated from it.
const leastKnown = 0.05

// left is the time that the rest takes at the rate so far, in words; "" where that is not known yet.
func (p *progress) left(part float64) string {
	passed := time.Since(p.since)
	if p.since.IsZero() || passed < barDelay || part-p.from < leastKnown || part >= 1 {
		return ""
	}
	rest := time.Duration(float64(passed) * (1 - part) / (part - p.from))
	if rest < time.Minute {
		return fmt.Sprintf(" about %d s left,", max(1, int(rest.Round(time.Second)/time.Second)))
	}
	return fmt.Sprintf(" about %d min left,", int((rest+time.Minute-1)/time.Minute))
}

func (p *progress) draw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paused {
		return
	}
	part, whole := p.done()
	files := ""
	if n := len(p.parts); n > 1 {
		files = fmt.Sprintf(" %d of %d files,", whole, n)
	}
	bar := p.model.ViewAs(part)
	if p.plain {
		bar = ansi.Strip(bar)
	}
	line := fmt.Sprintf("%s%s%s %s %s", bar, files, p.left(part), p.verb, oneLine(p.name))
	if width := outputWidth(p.w, func(string) string { return "" }); width > 0 {
		line = ansi.Truncate(line, width-1, "…") // what goes on in the next line would not be cleared
	}
	// lipgloss writes no more colours than the terminal has.
	_, _ = lipgloss.Fprint(p.w, "\r\x1b[2K", line)
	p.shown = true
}

// pause takes the bar off the terminal, for output; resume lets it come back.
func (p *progress) pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused = true
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[2K")
		p.shown = false
	}
}

func (p *progress) resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused = false
}

// end removes the bar, once the work is done: what is written after it is the output's alone. It may be called again.
func (p *progress) end() {
	p.once.Do(func() { close(p.stop) })
	p.ended.Wait()
	p.pause()
}
