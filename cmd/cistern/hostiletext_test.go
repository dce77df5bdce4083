package main

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/export"
	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/pytorch"
	"github.com/cistern-gpu/cistern/report"
)

// hostile are texts that a terminal, a spreadsheet, a page or a decoder would take for something else than text. Each begins with what
// it does, so that it begins a cell of its own where it is a tag.
var hostile = []string{"=HYPERLINK(\"http://example.com\",\"x\")", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "\x1b]0;owned\a", "\x1b[2Jcleared", "csi \u009b31m",
	"stray \xff\xfe", "cut \xe2\x82", "two\nlines\r", "zero \x00 byte", "del \x7f", "turned \u202egpj.exe", "isolate \u2066x", "para\u2029graph",
	"</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "quote \" comma , apostrophe '"}

// forbidden are the parts of them that must be in no output.
var forbidden = []string{"\x1b]0;owned", "\x1b[2Jcleared", "csi \u009b", "stray \xff", "cut \xe2\x82", "two\nlines", "zero \x00", "del \x7f", "turned \u202e",
	"isolate \u2066", "para\u2029"}

// hostileTrace has them wherever a file has text.
func hostileTrace() *recording.Trace {
	t := tinyTrace(0)
	t.Tags, t.Libraries, t.Threads = []string{""}, []string{""}, map[uint32]string{}
	t.Frames, t.Stacks, t.Events, t.Final, t.Initial = nil, []recording.Stack{nil}, nil, []recording.Segment{}, nil
	t.Settings = recording.Settings{Known: true, MaxSplitSize: -1, Conf: hostile[5], Raw: map[string]string{hostile[8]: hostile[5]}}
	t.Environment = recording.Environment{PyTorch: strings.Join(hostile, ""), CUDA: hostile[5] + hostile[8], Driver: hostile[10], Device: hostile[6] + hostile[7]}
	for i, s := range hostile {
		t.Tags, t.Libraries = append(t.Tags, s), append(t.Libraries, s)
		t.Threads[uint32(i+1)] = s
		t.Frames = append(t.Frames, recording.Frame{File: "/src/" + s, Func: s, Line: i + 1}, recording.Frame{File: s, Func: s})
		t.Stacks = append(t.Stacks, recording.Stack{uint32(2 * i), uint32(2*i + 1)})
		t.Events = append(t.Events, event.Event{Kind: event.Alloc, Addr: 1<<40 + uint64(i)<<21, Size: 1 << 20, TimeUS: int64(1000 + i), Stack: uint32(i + 1),
			Tag: uint16(i + 1), Library: uint8(i + 1), Thread: uint32(i + 1)})
		t.Notes = append(t.Notes, s)
	}
	last := t.Events[len(t.Events)-1]
	last.Kind, last.Addr, last.Size, last.TimeUS = event.OOM, 1<<20, 1<<30, last.TimeUS+1
	t.Events = append(t.Events, last)
	bad := hostile[5] + hostile[8] + hostile[10]
	t.Failures = []*recording.Failure{{Event: len(t.Events) - 1, Program: hostile, Version: bad, Conf: bad, Lines: hostile, Requested: 1 << 30, Need: 1 << 30, Upstream: bad,
		Tag: 6, Library: 6, Thread: 6, Stack: 6, Device: bad, UUID: bad, DeviceTotal: 1 << 30, OthersUnknown: bad,
		Steps:  []recording.FailureStep{{Stage: bad, Note: bad}},
		Limits: []recording.Limit{{Kind: bad, Bytes: 1 << 30, From: bad}}, Others: []recording.Neighbour{{PID: 1, Name: bad, Bytes: 1}}}}
	return t
}

// hostileDriver is a driver trace of a program that calls itself so.
func hostileDriver(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := driver.NewWriter(&b, 0, hostile)
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range hostile {
		p := w.Process(recording.Process{PID: uint32(100 + i), StartNS: 1, Program: "/bin/" + s})
		w.Untraced(recording.Untraced{PID: uint32(200 + i), Program: s, Why: s})
		w.Call(&recording.Call{Kind: recording.MemAlloc, TimeNS: uint64(1000 * (i + 1)), TookNS: 1, Addr: 1 << 40, Size: 1 << 20, Process: p, Thread: uint32(i + 1),
			Stack: w.Stack([]recording.Frame{{File: s, Func: s}})})
		w.Note(s)
	}
	if err := w.Close(recording.DriverEnd{Unknown: hostile}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestHostileText: whatever a recording says, no output has anything but text of it, and every output can be read.
func TestHostileText(t *testing.T) {
	inFolder(t)
	write := func(name string, data []byte) {
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var own, pickle bytes.Buffer
	bad := hostileTrace()
	if err := native.Write(&own, &recording.File{Traces: []*recording.Trace{bad}}); err != nil {
		t.Fatal(err)
	}
	if err := pytorch.Write(&pickle, bad); err != nil {
		t.Fatal(err)
	}
	write("hostile.cistern", own.Bytes())
	write("hostile.pickle", pickle.Bytes())
	write("driver.cistern", hostileDriver(t))

	type output struct {
		args  []string
		check func(t *testing.T, data []byte)
	}
	var outputs []output
	for _, in := range []string{"hostile.cistern", "hostile.pickle", "driver.cistern"} {
		for _, to := range formatNames() {
			tables := []string{""}
			check := checkBinary
			switch to {
			case "csv":
				check, tables = checkCSV, export.TableNames()
			case "parquet":
				tables = export.TableNames()
			}
			for _, table := range tables {
				args := []string{"convert", in, "-o", "-", "--to", to}
				if in == "driver.cistern" && to == "pytorch" || in != "driver.cistern" && table == "calls" {
					continue // which have no such thing
				}
				if table != "" {
					args = append(args, "--table", table)
				}
				outputs = append(outputs, output{args, check})
			}
		}
		for _, command := range []string{"inspect", "replay", "tune", "report"} {
			outputs = append(outputs, output{[]string{command, in}, checkText}, output{[]string{command, in, "--json"}, checkJSON},
				output{[]string{command, in, "--ndjson"}, checkJSON})
		}
		outputs = append(outputs, output{[]string{"diff", in, "tagged.pickle"}, checkText}, output{[]string{"diff", in, "tagged.pickle", "--json"}, checkJSON})
		if report.CheckBundle() == nil {
			outputs = append(outputs, output{[]string{"report", in, "-o", "-"}, checkPage}, output{[]string{"diff", in, "tagged.pickle", "--html", "-"}, checkPage})
		}
	}
	for _, o := range outputs {
		t.Run(strings.Join(o.args, " "), func(t *testing.T) {
			out, errs, code := cistern(t, "", o.args...)
			if code != exitOK && !strings.Contains(errs, "no request failed") {
				t.Fatalf("code %d: %s", code, errs)
			}
			checkText(t, []byte(errs))
			o.check(t, []byte(out))
		})
	}
}

// checkText: lines of text that a terminal only shows.
func checkText(t *testing.T, data []byte) {
	t.Helper()
	for line := range strings.SplitSeq(strings.TrimSuffix(string(data), "\n"), "\n") {
		if line != text.Clean(line) {
			t.Errorf("a line is not clean: %q", line)
		}
	}
}

// checkCSV: a table, of which no cell is a formula.
func checkCSV(t *testing.T, data []byte) {
	t.Helper()
	checkText(t, data)
	rows, err := csv.NewReader(bytes.NewReader(data)).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	quoted := 0
	for _, row := range rows {
		for _, cell := range row {
			if cell != "" && strings.ContainsAny(cell[:1], "=+-@\t\r") {
				t.Errorf("a cell is a formula: %q", cell)
			}
			if strings.HasPrefix(cell, "'=HYPERLINK(\"http") {
				quoted++
			}
		}
	}
	if quoted == 0 || len(rows) < len(hostile) {
		t.Errorf("%d rows, the formula is in %d cells: the table has not what the test is about", len(rows), quoted)
	}
}

// checkJSON: documents whose strings are all text.
func checkJSON(t *testing.T, data []byte) {
	t.Helper()
	if !utf8.Valid(data) {
		t.Error("it is not UTF-8")
	}
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case string:
			if v != text.Clean(v) {
				t.Errorf("a string is not clean: %q", v)
			}
		case []any:
			for _, x := range v {
				walk(x)
			}
		case map[string]any:
			for k, x := range v {
				walk(k)
				walk(x)
			}
		}
	}
	for d := json.NewDecoder(bytes.NewReader(data)); d.More(); {
		var v any
		if err := d.Decode(&v); err != nil {
			t.Fatal(err)
		}
		walk(v)
	}
}

// checkPage: no text ends the script that it is in.
func checkPage(t *testing.T, data []byte) {
	t.Helper()
	if s := string(data); !utf8.ValidString(s) || strings.Contains(s, "<script>alert(1)") || strings.Contains(s, "<img src=x") {
		t.Error("the page is not UTF-8, or a text of the recording is markup in it")
	}
	checkBinary(t, data)
}

// checkBinary: what is in a file, unpacked, has the texts cleaned.
func checkBinary(t *testing.T, data []byte) {
	t.Helper()
	all := unpacked(data)
	for _, bad := range forbidden {
		if i := bytes.Index(all, []byte(bad)); i >= 0 {
			t.Errorf("it has %q", all[max(0, i-20):min(len(all), i+20)])
		}
	}
	if !bytes.Contains(all, []byte("\ufffd[2Jcleared")) && !bytes.Contains(all, []byte(`\ufffd[2Jcleared`)) {
		t.Error("it has not what the test is about")
	}
}

// unpacked is data, and what is in the compressed pieces of it.
func unpacked(data []byte) []byte {
	all := bytes.Clone(data)
	for i := range data {
		var r io.Reader
		switch {
		case bytes.HasPrefix(data[i:], []byte{0x1f, 0x8b, 8}):
			if z, err := gzip.NewReader(bytes.NewReader(data[i:])); err == nil {
				z.Multistream(false)
				r = z
			}
		case bytes.HasPrefix(data[i:], []byte{0x28, 0xb5, 0x2f, 0xfd}):
			if z, err := zstd.NewReader(bytes.NewReader(data[i:]), zstd.WithDecoderConcurrency(1)); err == nil {
				defer z.Close()
				r = z
			}
		}
		if r != nil {
			piece, _ := io.ReadAll(r) // what follows it is not compressed
			all = append(append(all, fmt.Sprintf("\n%d:", i)...), piece...)
		}
	}
	return all
}
