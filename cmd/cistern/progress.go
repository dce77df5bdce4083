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
	}
}

func (p *progress) draw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paused {
		return
	}
	sum, whole := 0.0, 0
	for _, x := range p.parts {
		sum += x
		if x == 1 {
			whole++
		}
	}
	files := ""
	if n := len(p.parts); n > 1 {
		files = fmt.Sprintf(" %d of %d files,", whole, n)
	}
	bar := p.model.ViewAs(sum / float64(max(1, len(p.parts))))
	if p.plain {
		bar = ansi.Strip(bar)
	}
	// lipgloss writes no more colours than the terminal has.
	_, _ = lipgloss.Fprintf(p.w, "\r\x1b[2K%s%s %s %s", bar, files, p.verb, oneLine(p.name))
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
