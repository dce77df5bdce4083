// Package rmm reads RMM's log: rapidsai/rmm's logging_resource_adaptor writes a header and one row for each call,
//
//	Thread,Time,Action,Pointer,Size,Stream
//	19165,07:34:49.947326,allocate,0x7f8a00000000,1024,0x1
//
// with the time of day, pointers and streams in hexadecimal, sizes in bytes. An allocation is logged after it
// happened and a free before, so the rows of one address are in order whatever the threads do. A free is in stream
// order and its memory may be reused at once, so it becomes free_requested and free_completed.
package rmm

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/initial"
	"github.com/cistern-gpu/cistern/recording/internal/input"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
)

const (
	longestRow = 4096      // bytes of the longest row that is read
	dayUS      = 86400e6   // microseconds of a day
	wrapUS     = dayUS / 2 // a time this much below the last row's is the next day; less is threads out of order
)

// columnNames are those of the log; RMM has always written all six, in this order, but a header says so.
var columnNames = []string{"thread", "time", "action", "pointer", "size", "stream"}

const (
	colThread = iota
	colTime
	colAction
	colPointer
	colSize
	colStream
	numCols
)

// header is the column at each position, or false when line is no header of a log.
func header(line []byte) ([]int, bool) {
	fields := strings.Split(strings.TrimPrefix(string(line), "\ufeff"), ",")
	var cols []int
	have := 0
	for _, f := range fields {
		f = strings.ToLower(strings.Trim(f, " \t\r\n\""))
		col := -1
		for i, name := range columnNames {
			if f == name {
				if have&(1<<i) != 0 {
					return nil, false
				}
				col = i
				have |= 1 << i
			}
		}
		cols = append(cols, col)
	}
	need := 1<<colTime | 1<<colAction | 1<<colPointer | 1<<colSize
	return cols, have&need == need && len(cols) <= 32
}

type reader struct {
	in      *input.Input
	b       *input.Budget
	cols    []int
	line    int
	events  tables.EventList
	streams tables.Interned
	lastUS  int64 // of the last row, days included
	days    int64
	failed  int
	unknown map[string]int
	cut     bool
}

// Is reports whether a file that begins with head is a log: whether its first line is a header.
func Is(head []byte) bool {
	line, _, _ := bytes.Cut(head, []byte("\n"))
	_, ok := header(line)
	return ok
}

// Read reads a log; path is how errors and the trace name it. r is not used after Read has returned.
func Read(r io.Reader, path string) (*recording.File, error) {
	return input.File(r, path, func(in *input.Input) (*recording.File, error) {
		l := &reader{in: in, b: input.NewBudget(in.Offset, in.Stored)}
		if err := l.rows(); err != nil {
			return nil, err
		}
		t, err := l.trace(path)
		return &recording.File{Format: recording.FormatRMM, Traces: []*recording.Trace{t}}, err
	})
}

// rows reads all rows.
func (r *reader) rows() error {
	in := r.in
	for {
		line, err := r.next()
		if err != nil {
			return err
		}
		if line == nil {
			return nil
		}
		if err := r.row(line); err != nil {
			if in.EOF && in.Pos == in.End && in.Err == nil && !r.whole(line) {
				r.cut = true // the last row has no newline: the log was cut while RMM wrote it
				return nil
			}
			return &recording.Error{Offset: -1, Event: -1, Line: r.line, Msg: err.Error()}
		}
	}
}

// trace is what the rows were.
func (r *reader) trace(path string) (*recording.Trace, error) {
	t := &recording.Trace{Path: path, Format: recording.FormatRMM, Device: deviceOf(path), Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil},
		Settings: recording.Settings{MaxSplitSize: -1}}
	if r.events.N == 0 {
		return nil, &recording.Error{Offset: -1, Event: -1, Line: r.line, Msg: "the log has no rows; expected allocate, free or " +
			"allocate failure"}
	}
	var err error
	if t.Events, err = r.events.Join(r.b); err != nil {
		return nil, err
	}
	t.Streams = r.streams.Vals
	if err := initial.Find(t, initial.Options{Charge: r.b.Take}); err != nil {
		return nil, err
	}
	t.Note("an RMM log has neither segments nor settings, and times of day without a date")
	if r.failed > 0 {
		t.Note("%d requests failed; the log does not say how much memory the device had free then", r.failed)
	}
	for _, a := range slices.Sorted(maps.Keys(r.unknown)) {
		t.Note("%d rows of unknown action %q were left out", r.unknown[a], a)
	}
	if r.cut {
		t.Note("the last row is cut off and was left out")
	}
	return t, nil
}

func (r *reader) whole(line []byte) bool {
	return len(line) > 0 && line[len(line)-1] == '\n'
}

// next is the next line with its newline, nil at the end.
func (r *reader) next() ([]byte, error) {
	in := r.in
	for {
		if i := bytes.IndexByte(in.Buf[in.Pos:in.End], '\n'); i >= 0 && i < longestRow {
			line := in.Buf[in.Pos : in.Pos+i+1]
			in.Pos += i + 1
			r.line++
			return line, nil
		}
		if in.End-in.Pos >= longestRow {
			return nil, &recording.Error{Offset: -1, Event: -1, Line: r.line + 1,
				Msg: fmt.Sprintf("a row of more than %d bytes; expected an RMM log", longestRow)}
		}
		if !in.Need(in.End - in.Pos + 1) {
			break
		}
	}
	if in.Err != nil {
		return nil, in.Truncated("a row")
	}
	if in.Pos == in.End {
		return nil, nil
	}
	line := in.Buf[in.Pos:in.End]
	in.Pos = in.End
	r.line++
	return line, nil
}

func (r *reader) row(line []byte) error {
	text := bytes.TrimRight(line, "\r\n")
	if len(bytes.TrimSpace(text)) == 0 {
		return nil
	}
	// Adaptors that write to one file each write a header.
	if c := bytes.TrimPrefix(text, []byte("\ufeff")); r.cols == nil || len(c) > 0 && (c[0] == 'T' || c[0] == '"') {
		if cols, ok := header(text); ok {
			r.cols = cols
			return nil
		}
		if r.cols == nil {
			return fmt.Errorf("expected the header %s", "Thread,Time,Action,Pointer,Size,Stream")
		}
	}
	var f row
	if err := r.split(text, &f); err != nil {
		return err
	}
	var e event.Event
	stream, err := f.numbers(&e)
	if err != nil {
		return err
	}
	e.TimeUS = r.dated(e.TimeUS)
	return r.add(&e, stream, f[colAction])
}

// row is the fields of a row by column; nil where the log has no such column.
type row [numCols][]byte

// split takes a row apart.
func (r *reader) split(text []byte, f *row) error {
	rest := text
	for i, col := range r.cols {
		var field []byte
		j := bytes.IndexByte(rest, ',')
		switch {
		case i == len(r.cols)-1 && j >= 0:
			return fmt.Errorf("more than the %d fields of the header", len(r.cols))
		case i < len(r.cols)-1 && j < 0:
			return fmt.Errorf("%d fields; expected %d", i+1, len(r.cols))
		case j < 0:
			field, rest = rest, nil
		default:
			field, rest = rest[:j], rest[j+1:]
		}
		if col >= 0 {
			f[col] = bytes.Trim(field, " \t\"")
		}
	}
	return nil
}

// numbers are those of a row: in e, with the time of day, and the handle of the stream.
func (f *row) numbers(e *event.Event) (stream uint64, err error) {
	var ok bool
	if e.TimeUS, ok = timeOfDay(f[colTime]); !ok {
		return 0, fmt.Errorf("time %q; expected hh:mm:ss.ffffff", input.Clip(f[colTime]))
	}
	if e.Size, err = strconv.ParseUint(string(f[colSize]), 10, 64); err != nil {
		return 0, fmt.Errorf("size %q; expected bytes", input.Clip(f[colSize]))
	}
	if e.Addr, ok = hexNumber(f[colPointer]); !ok {
		return 0, fmt.Errorf("pointer %q; expected a hexadecimal address", input.Clip(f[colPointer]))
	}
	if f[colStream] != nil {
		if stream, ok = hexNumber(f[colStream]); !ok {
			return 0, fmt.Errorf("stream %q; expected a hexadecimal handle", input.Clip(f[colStream]))
		}
	}
	return stream, nil
}

// dated adds the days that have passed to a time of day.
func (r *reader) dated(us int64) int64 {
	us += r.days * dayUS
	if us < r.lastUS-wrapUS {
		r.days++
		us += dayUS
	}
	r.lastUS = us
	return us
}

// add takes in the event of a row.
func (r *reader) add(e *event.Event, stream uint64, action []byte) (err error) {
	switch string(action) {
	case "allocate":
		e.Kind = event.Alloc
	case "free", "deallocate":
		e.Kind = event.FreeRequested
	case "allocate failure":
		e.Kind, e.Addr = event.OOM, 0
		r.failed++
	default:
		if r.unknown == nil {
			r.unknown = map[string]int{}
		}
		if a := input.Clip(action); len(r.unknown) < 16 || r.unknown[a] > 0 {
			r.unknown[a]++
			return nil
		}
		return fmt.Errorf("action %q; expected allocate, free or allocate failure", input.Clip(action))
	}
	if e.Addr == 0 && e.Kind != event.OOM {
		return nil // a request of no bytes
	}
	if e.Stream, err = r.streams.Charged(r.b, stream); err != nil {
		return err
	}
	if err := r.events.Add(r.b, *e); err != nil || e.Kind != event.FreeRequested {
		return err
	}
	e.Kind = event.FreeCompleted
	return r.events.Add(r.b, *e)
}

// timeOfDay is hh:mm:ss.ffffff in microseconds; old versions wrote a colon before the fraction.
func timeOfDay(s []byte) (int64, bool) {
	if len(s) < 8 || s[2] != ':' || s[5] != ':' {
		return 0, false
	}
	var n [3]int64
	for i := range n {
		hi, lo := s[3*i]-'0', s[3*i+1]-'0'
		if hi > 9 || lo > 9 {
			return 0, false
		}
		n[i] = int64(hi)*10 + int64(lo)
	}
	if n[0] > 23 || n[1] > 59 || n[2] > 60 {
		return 0, false
	}
	us := ((n[0]*60+n[1])*60 + n[2]) * 1e6
	if len(s) == 8 {
		return us, true
	}
	if s[8] != '.' && s[8] != ':' || len(s) == 9 {
		return 0, false
	}
	unit := int64(1e5)
	for _, c := range s[9:] {
		if c < '0' || c > '9' {
			return 0, false
		}
		us += int64(c-'0') * unit
		unit /= 10
	}
	return us, true
}

// hexNumber reads what C's printf and C++ streams write for a pointer.
func hexNumber(s []byte) (uint64, bool) {
	if string(s) == "(nil)" || string(s) == "nullptr" {
		return 0, true
	}
	if len(s) > 2 && s[0] == '0' && (s[1] == 'x' || s[1] == 'X') {
		s = s[2:]
	}
	if len(s) == 0 || len(s) > 16 {
		return 0, false
	}
	var n uint64
	for _, c := range s {
		switch {
		case c >= '0' && c <= '9':
			n = n<<4 | uint64(c-'0')
		case c >= 'a' && c <= 'f':
			n = n<<4 | uint64(c-'a'+10)
		case c >= 'A' && c <= 'F':
			n = n<<4 | uint64(c-'A'+10)
		default:
			return 0, false
		}
	}
	return n, true
}

var devSuffix = regexp.MustCompile(`\.dev(\d{1,3})\b`)

// deviceOf is the device of a log, which RMM's Python writes into the file's name: rmm_log.dev1.txt.
func deviceOf(path string) int {
	if m := devSuffix.FindStringSubmatch(filepath.Base(path)); m != nil {
		n, _ := strconv.Atoi(m[1])
		return n
	}
	return 0
}
