package probe

import (
	"encoding/csv"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/lab/meter"
)

// waited is the duration from which on a call under load counts as having waited for the kernel.
const waited = 50 * time.Millisecond

// key is what one line of the table is about.
type key struct {
	section string
	call    string
	size    uint64 // bytes; 0 where the call has none
	load    string
}

type line struct {
	key
	times []time.Duration
	note  string
}

// table holds the measurements in the order in which they were first made.
type table struct {
	lines   []*line
	index   map[key]*line
	printed int // lines that print has shown
}

func (t *table) line(k key) *line {
	if l, ok := t.index[k]; ok {
		return l
	}
	if t.index == nil {
		t.index = make(map[key]*line)
	}
	l := &line{key: k}
	t.lines = append(t.lines, l)
	t.index[k] = l
	return l
}

// measure times one call. A call that fails is noted and its error returned.
func (t *table) measure(k key, call func() error) (time.Duration, error) {
	start := time.Now()
	err := call()
	d := time.Since(start)
	l := t.line(k)
	if err != nil {
		l.note = err.Error()
		return d, err
	}
	l.times = append(l.times, d)
	return d, nil
}

// note adds a line that is no measurement.
func (t *table) note(section, text string) { t.remark(key{section: section}, text) }

func (t *table) remark(k key, text string) {
	l := t.line(k)
	if l.note != "" {
		l.note += "; "
	}
	l.note += text
}

// wait is what a line says about waiting for the kernel: nothing for an idle GPU.
func (l *line) wait() string {
	if l.load == "" || l.load == "idle" || len(l.times) == 0 {
		return ""
	}
	n := 0
	for _, d := range l.times {
		if d > waited {
			n++
		}
	}
	switch n {
	case 0:
		return "no"
	case len(l.times):
		return "WAITS"
	}
	return fmt.Sprintf("%d of %d", n, len(l.times))
}

// fields are the columns after section, call and size: load, n, min, median, max in microseconds, waited, note.
func (l *line) fields() []string {
	f := []string{l.load, "", "", "", "", l.wait(), l.note}
	if n := len(l.times); n > 0 {
		us := func(d time.Duration) string { return strconv.FormatFloat(float64(d.Nanoseconds())/1e3, 'f', 2, 64) }
		f[1], f[2], f[3], f[4] = strconv.Itoa(n), us(slices.Min(l.times)), us(meter.Median(l.times)), us(slices.Max(l.times))
	}
	return f
}

// print shows the lines that are new since it was last called: a step of the probe at a time, so that what was measured
// is known whatever happens in the next.
func (t *table) print(w io.Writer) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "section\tcall\tsize\tload\tn\tmin us\tmedian us\tmax us\twaited\tnote")
	for _, l := range t.lines[t.printed:] {
		size := ""
		if l.size != 0 {
			size = units.FormatBytes(l.size)
		}
		fmt.Fprintf(tw, "%s\t%s\t%s", l.section, l.call, size)
		for _, f := range l.fields() {
			fmt.Fprintf(tw, "\t%s", f)
		}
		fmt.Fprintln(tw)
	}
	fmt.Fprintln(tw)
	t.printed = len(t.lines)
	tw.Flush()
}

func (t *table) writeCSV(path string) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	w := csv.NewWriter(f)
	w.Write([]string{"section", "call", "size_bytes", "load", "n", "min_us", "median_us", "max_us", "waited", "note"})
	for _, l := range t.lines {
		w.Write(append([]string{l.section, l.call, strconv.FormatUint(l.size, 10)}, l.fields()...))
	}
	w.Flush()
	return w.Error()
}
