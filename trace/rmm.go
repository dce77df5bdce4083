package trace

import (
	"bytes"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/event"
)

// RMM's log: rapidsai/rmm's logging_resource_adaptor writes a header and one row for each call,
//
//	Thread,Time,Action,Pointer,Size,Stream
//	19165,07:34:49.947326,allocate,0x7f8a00000000,1024,0x1
//
// with the time of day, pointers and streams in hexadecimal, sizes in bytes. An allocation is logged after it
// happened and a free before, so the rows of one address are in order whatever the threads do. A free is in stream
// order and its memory may be reused at once, so it becomes free_requested and free_completed.

const (
	rmmLine = 4096      // bytes of the longest row that is read
	dayUS   = 86400e6   // microseconds of a day
	wrapUS  = dayUS / 2 // a time this much below the last row's is the next day; less is threads out of order
)

// columns of the log; RMM has always written all six, in this order, but a header says so.
var rmmColumns = []string{"thread", "time", "action", "pointer", "size", "stream"}

const (
	colThread = iota
	colTime
	colAction
	colPointer
	colSize
	colStream
	numCols
)

// rmmHeader is the column at each position, or false when line is no header of a log.
func rmmHeader(line []byte) ([]int, bool) {
	fields := strings.Split(strings.TrimPrefix(string(line), "\ufeff"), ",")
	var cols []int
	have := 0
	for _, f := range fields {
		f = strings.ToLower(strings.Trim(f, " \t\r\n\""))
		col := -1
		for i, name := range rmmColumns {
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

type rmmReader struct {
	in      *input
	b       *budget
	cols    []int
	line    int
	raw     rawTrace
	lastUS  int64 // of the last row, days included
	days    int64
	failed  int
	unknown map[string]int
	cut     bool
}

// readRMM reads a log into one Trace.
func readRMM(in *input, path string) ([]*Trace, error) {
	r := &rmmReader{in: in, b: newBudget(in.offset, in.stored)}
	for {
		line, err := r.next()
		if err != nil {
			return nil, err
		}
		if line == nil {
			break
		}
		if err := r.row(line); err != nil {
			if in.eof && in.pos == in.end && in.err == nil && !r.whole(line) {
				r.cut = true // the last row has no newline: the log was cut while RMM wrote it
				break
			}
			return nil, &Error{Offset: -1, Event: -1, Line: r.line, Msg: err.Error()}
		}
	}
	t := &Trace{Path: path, Format: FormatRMM, Device: rmmDevice(path), Pools: []PoolID{{}}, Stacks: []Stack{nil},
		Settings: Settings{MaxSplitSize: -1}}
	if r.raw.n == 0 {
		return nil, &Error{Offset: -1, Event: -1, Line: r.line, Msg: "the log has no rows; expected allocate, free or " +
			"allocate failure"}
	}
	var err error
	if t.Events, err = r.raw.join(r.b); err != nil {
		return nil, err
	}
	t.Streams = r.raw.streams.vals
	if err := t.walkBack(r.b, false, true); err != nil {
		return nil, err
	}
	t.note("an RMM log has neither segments nor settings, and times of day without a date")
	if r.failed > 0 {
		t.note("%d requests failed; the log does not say how much memory the device had free then", r.failed)
	}
	for _, a := range sortedKeys(r.unknown) {
		t.note("%d rows of unknown action %q were left out", r.unknown[a], a)
	}
	if r.cut {
		t.note("the last row is cut off and was left out")
	}
	return []*Trace{t}, nil
}

func (r *rmmReader) whole(line []byte) bool {
	return len(line) > 0 && line[len(line)-1] == '\n'
}

// next is the next line with its newline, nil at the end.
func (r *rmmReader) next() ([]byte, error) {
	in := r.in
	for {
		if i := bytes.IndexByte(in.buf[in.pos:in.end], '\n'); i >= 0 && i < rmmLine {
			line := in.buf[in.pos : in.pos+i+1]
			in.pos += i + 1
			r.line++
			return line, nil
		}
		if in.end-in.pos >= rmmLine {
			return nil, &Error{Offset: -1, Event: -1, Line: r.line + 1,
				Msg: fmt.Sprintf("a row of more than %d bytes; expected an RMM log", rmmLine)}
		}
		if !in.need(in.end - in.pos + 1) {
			break
		}
	}
	if in.err != nil {
		return nil, in.truncated("a row")
	}
	if in.pos == in.end {
		return nil, nil
	}
	line := in.buf[in.pos:in.end]
	in.pos = in.end
	r.line++
	return line, nil
}

func (r *rmmReader) row(line []byte) error {
	text := bytes.TrimRight(line, "\r\n")
	if len(bytes.TrimSpace(text)) == 0 {
		return nil
	}
	// Adaptors that write to one file each write a header.
	if c := bytes.TrimPrefix(text, []byte("\ufeff")); r.cols == nil || len(c) > 0 && (c[0] == 'T' || c[0] == '"') {
		if cols, ok := rmmHeader(text); ok {
			r.cols = cols
			return nil
		}
		if r.cols == nil {
			return fmt.Errorf("expected the header %s", "Thread,Time,Action,Pointer,Size,Stream")
		}
	}
	var f [numCols][]byte
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
	us, ok := timeOfDay(f[colTime])
	if !ok {
		return fmt.Errorf("time %q; expected hh:mm:ss.ffffff", clip(f[colTime]))
	}
	us += r.days * dayUS
	if us < r.lastUS-wrapUS {
		r.days++
		us += dayUS
	}
	r.lastUS = us
	size, err := strconv.ParseUint(string(f[colSize]), 10, 64)
	if err != nil {
		return fmt.Errorf("size %q; expected bytes", clip(f[colSize]))
	}
	addr, ok := hexNumber(f[colPointer])
	if !ok {
		return fmt.Errorf("pointer %q; expected a hexadecimal address", clip(f[colPointer]))
	}
	var stream uint64
	if f[colStream] != nil {
		if stream, ok = hexNumber(f[colStream]); !ok {
			return fmt.Errorf("stream %q; expected a hexadecimal handle", clip(f[colStream]))
		}
	}
	e := event.Event{Addr: addr, Size: size, TimeUS: us}
	switch string(f[colAction]) {
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
		if a := clip(f[colAction]); len(r.unknown) < 16 || r.unknown[a] > 0 {
			r.unknown[a]++
			return nil
		}
		return fmt.Errorf("action %q; expected allocate, free or allocate failure", clip(f[colAction]))
	}
	if addr == 0 && e.Kind != event.OOM {
		return nil // a request of no bytes
	}
	if e.Stream, err = r.raw.streams.charged(r.b, stream); err != nil {
		return err
	}
	if err := r.raw.add(r.b, e); err != nil {
		return err
	}
	if e.Kind == event.FreeRequested {
		e.Kind = event.FreeCompleted
		return r.raw.add(r.b, e)
	}
	return nil
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

// rmmDevice is the device of a log, which RMM's Python writes into the file's name: rmm_log.dev1.txt.
func rmmDevice(path string) int {
	if m := devSuffix.FindStringSubmatch(filepath.Base(path)); m != nil {
		n, _ := strconv.Atoi(m[1])
		return n
	}
	return 0
}
