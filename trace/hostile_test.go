package trace

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/cputime"
)

// pk strings together a pickle: bytes and opcodes as they are, strings as SHORT_BINUNICODE, integers as LONG1.
func pk(parts ...any) []byte {
	b := []byte{opProto, 4}
	for _, p := range parts {
		switch p := p.(type) {
		case byte:
			b = append(b, p)
		case rune:
			b = append(b, byte(p))
		case []byte:
			b = append(b, p...)
		case string:
			b = append(append(b, opShortBinunicode, byte(len(p))), p...)
		case int:
			b = binary.LittleEndian.AppendUint64(append(b, opLong1, 8), uint64(p))
		default:
			panic(fmt.Sprintf("%T", p))
		}
	}
	return b
}

// entry is one trace entry.
func entry(action string, addr, size int) []byte {
	return pk('}', '(', "action", action, "addr", addr, "size", size, "stream", 0, "time_us", 5, 'u')[2:]
}

// around makes a snapshot of one device around the inside of its list.
func around(inside []byte) []byte {
	return pk('}', '(', "segments", ']', "device_traces", ']', '(', ']', '(', inside, 'e', 'e', 'u', '.')
}

func u32(n uint32) []byte { return binary.LittleEndian.AppendUint32(nil, n) }
func u64(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }

// A bad file is refused in one line that names it, the place and what was expected, in bounded memory and time.
func refusedFile(t *testing.T, file []byte, want string) {
	t.Helper()
	if msg := refusal(t, file); !strings.Contains(msg, want) {
		t.Errorf("got %q; expected it to say %q", msg, want)
	}
}

func refusal(t *testing.T, file []byte) string {
	t.Helper()
	var err error
	start := cputime.Process()
	peak := peakHeap(func() { _, err = Read(bytes.NewReader(file), "some.file") })
	// The bound of budget.go, and as much again for what the collector has not taken yet.
	if limit := uint64(2 * (memoryBase + 8<<20 + cisternFactor*len(file))); peak > limit {
		t.Errorf("%d bytes of memory for a file of %d", peak, len(file))
	}
	if d := cputime.Process() - start; d > 20*time.Second {
		t.Errorf("it took %s of the processor", d)
	}
	if err == nil {
		t.Fatal("read without an error")
	}
	var e *Error
	if !errors.As(err, &e) || e.Path != "some.file" {
		t.Fatalf("%T %v; expected an *Error that names the file", err, err)
	}
	if msg := err.Error(); strings.ContainsAny(msg, "\n\r") || !strings.HasPrefix(msg, "some.file: ") || len(msg) > 400 {
		t.Fatalf("%q; expected one line that begins with the file's name", msg)
	}
	return err.Error()
}

func TestHostilePickles(t *testing.T) {
	one := entry("alloc", 4096, 512)
	many := func(n int, b ...byte) []byte { return bytes.Repeat(b, n) }
	var laughs []byte // nine lists of ten references to the one before
	laughs = append(laughs, ']', opMemoize)
	for i := range 9 {
		laughs = append(laughs, ']', opMemoize, '(')
		for range 10 {
			laughs = append(laughs, 'h', byte(i))
		}
		laughs = append(laughs, 'e')
	}
	for _, c := range []struct {
		name string
		file []byte
		want string
	}{
		{"nested lists", pk(many(1_000_000, ']', '(')), "byte 2003: nested more than 1000 deep"},
		{"nested lists without marks", pk(many(60_000_000, ']')), "needs more memory"},
		{"nested tuples", pk(append(many(1_000_000, ')'), many(1_000_000, opTuple1)...)), "needs more memory"},
		{"marks only", pk(many(1_000_000, '(')), "nested more than 1000 deep"},
		{"a stack of Nones", pk('(', many(60_000_000, 'N')), "needs more memory"},
		{"a string of 2^63 bytes", pk(byte(opBinunicode8), u64(1<<63)), "a string of 9223372036854775808 bytes"},
		{"a string longer than the file", pk(byte(opBinunicode), u32(1<<20), many(1000, 'x')), "ends inside BINUNICODE"},
		{"bytes of 2^63", pk(byte(opBinbytes8), u64(1<<63)), "ends inside BINBYTES8"},
		{"an integer of 2^31 bytes", pk(byte(opLong4), u32(1<<31)), "an integer of 2147483648 bytes"},
		{"a memo entry far out", pk(']', byte(opLongBinput), u32(1<<32-1)), "byte 3: memo entry 4294967295 after 0"},
		{"a memo entry that is not there", pk(byte(opLongBinget), u32(77)), "memo entry 77 does not exist"},
		{"a memo entry in a gap", pk(']', 'q', byte(9), 'h', byte(3)), "memo entry 3 does not exist"},
		{"a million memo leaps", pk(']', leaps(200_000)), "needs more memory"},
		{"a list inside itself", pk(']', byte(opMemoize), '(', 'h', byte(0), 'e', '.'), "holds a list; expected a snapshot"},
		{"a billion laughs", pk(laughs, '.'), "expected a snapshot"},
		{"a dict of itself", pk('}', byte(opMemoize), '(', "a", 'h', byte(0), 'u', '.'), "no device_traces"},
		{"STOP at once", pk('.'), "holds nothing"},
		{"two values", pk('}', '}', '.'), "byte 4: the pickle holds a dict"},
		{"data after STOP", append(around(one), '.'), "data after the pickle's end"},
		{"APPENDS to nothing", pk('e'), "APPENDS without a MARK"},
		{"SETITEMS of one", pk('}', '(', "a", 'u', '.'), "a key without a value"},
		{"a number as key", pk('}', '(', 1, 2, 'u', '.'), "a key is an int"},
		{"protocol 0", []byte("(dp0\nS'a'\np1\nI1\ns."), "byte 0: a pickle of protocol 0 or 1?"},
		{"protocol 9", []byte{opProto, 9, '.'}, "pickle protocol 9; expected 2 to 5"},
		{"no opcode", pk(byte(0xff)), "byte 2: byte 0xff is no pickle opcode"},
		{"DUP", pk(']', '2'), "opcode DUP; expected"},
		{"an entry without size", around(pk('}', '(', "action", "alloc", "addr", 1, "stream", 0, 'u')[2:]),
			`event 0 of device 0: the trace entry has no "size"`},
		{"an entry without action", around(append(one, pk('}', '(', "addr", 1, 'u')[2:]...)),
			`event 1 of device 0: the trace entry has no "action"`},
		{"an entry twice", around(pk(one[:1], byte(opMemoize), one[1:], 'h', byte(0))[2:]), "in the file twice"},
		{"an entry inside an entry", around(pk('}', '(', "action", ']', '(', one, 'e', 'u')[2:]), "action is a list"},
		{"an address below zero", around(entry("alloc", -1, 5)), "addr is a negative int"},
		{"a size of a string", around(pk('}', '(', "action", "alloc", "addr", 1, "size", "big", 'u')[2:]), "size is a string"},
		{"a time of 2^63", around(pk('}', '(', "action", "alloc", "time_us", byte(opLong1), []byte{9}, many(7, 0), byte(0x80), byte(0), 'u')[2:]),
			"time_us is 9223372036854775808; expected at most 2^63-1"},
		{"a stream of 72 bits", around(pk('}', '(', "action", "alloc", "stream", byte(opLong1), []byte{9}, many(9, 1), 'u')[2:]),
			"stream is an int of more than 64 bits; expected an int of 64 bits"},
		{"a trace of numbers", around(pk(1, 2, 3)[2:]), "a device's trace holds an int"},
		{"device_traces a number", pk('}', '(', "device_traces", 5, 'u', '.'), "device_traces is an int"},
		{"device_traces of numbers", pk('}', '(', "device_traces", ']', '(', 5, 'e', 'u', '.'), "device_traces holds an int"},
		{"device_traces twice", pk('}', '(', "device_traces", ']', "device_traces", ']', 'u', '.'), "a second time"},
		{"ten thousand settings", pk('}', '(', "allocator_settings", '}', '(', bytes.Repeat(pk("roundup_power2_divisions",
			'}')[2:], 10_000), 'u', 'u', '.'), "more than 1024 allocator settings"},
		{"no events", around(nil), "the snapshot has no events"},
		{"300 devices", pk('}', '(', "device_traces", ']', '(', many(300, ']'), 'e', 'u', '.'), "more than 256 devices"},
		{"a segment beyond the address space", pk('}', '(', "segments", ']', '(', '}', '(', "address", -1&(1<<63-1),
			"total_size", 1<<63-1, 'u', '}', '(', "address", 8, "total_size", byte(opLong1), []byte{9}, many(8, 0xff),
			byte(0), 'u', 'e', 'u', '.'), "segment 1 ends beyond the address space"},
		{"a block outside its segment", pk('}', '(', "segments", ']', '(', '}', '(', "address", 4096, "total_size", 1024,
			"blocks", ']', '(', '}', '(', "address", 4096, "size", 2048, "state", "inactive", 'u', 'e', 'u', 'e', 'u', '.'),
			"block 0 of segment 0 lies outside it"},
		{"a state that is none", pk('}', '(', "segments", ']', '(', '}', '(', "blocks", ']', '(', '}', '(', "state",
			"sleeping", 'u'), `state is "sleeping"`},
		{"frames of numbers", around(pk('}', '(', "action", "alloc", "frames", ']', '(', 7, 'e')[2:]), "frames holds an int"},
	} {
		t.Run(c.name, func(t *testing.T) { refusedFile(t, c.file, c.want) })
	}
}

// leaps are PUTs as far apart as a memo allows.
func leaps(n int) (b []byte) {
	for i := range n {
		b = append(append(b, opLongBinput), u32(uint32(i*memoChunk))...)
	}
	return b
}

// Every opcode by which a pickle can name, call or build anything is refused by its name, wherever it stands.
func TestOpcodesThatRunCode(t *testing.T) {
	for op, why := range refused {
		if why == "" {
			continue
		}
		arg := []byte("os\nsystem\n")
		want := fmt.Sprintf("opcode %s %s", opNames[op], why)
		refusedFile(t, pk(byte(op), arg, '.'), "byte 2: "+want)
		// In a part of the file that is otherwise skipped.
		refusedFile(t, pk('}', '(', "unknown", '}', '(', "a", byte(op), arg), want)
		refusedFile(t, around(append(entry("alloc", 1, 2), byte(op))), want)
	}
	if n := len(refused) - strings.Count(strings.Join(refused[:], "|")+"|", "||"); n < 15 {
		t.Errorf("%d opcodes refused; expected all 15", n)
	}
	refusedFile(t, []byte("\x80\x02cposix\nsystem\nq\x00X\x04\x00\x00\x00trueq\x01\x85q\x02Rq\x03."),
		"byte 2: opcode GLOBAL names a Python class or function")
}

// A file that ends too early is said to, wherever it ends.
func TestTruncated(t *testing.T) {
	var pickle, packed bytes.Buffer
	if err := WritePyTorch(&pickle, synthetic().Traces...); err != nil {
		t.Fatal(err)
	}
	z := gzip.NewWriter(&packed)
	z.Write(pickle.Bytes())
	z.Close()
	for n := range pickle.Len() {
		if _, err := Read(bytes.NewReader(pickle.Bytes()[:n]), "some.file"); err == nil {
			t.Fatalf("%d of %d bytes read without an error", n, pickle.Len())
		} else if n > 2 && !strings.Contains(err.Error(), fmt.Sprintf("some.file: byte %d: the file ends inside", n)) {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
	for n := range packed.Len() {
		if n == 0 {
			continue
		}
		if _, err := Read(bytes.NewReader(packed.Bytes()[:n]), "some.file"); err == nil {
			t.Fatalf("%d of %d bytes of gzip read without an error", n, packed.Len())
		}
	}
	refusedFile(t, packed.Bytes()[:packed.Len()-9], "gzip: unexpected EOF")
	for _, path := range []string{"testdata/detection.pickle.gz"} {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 60 {
			refusal(t, b[:1+len(b)*i/60])
		}
	}
}

// Flipped bytes never crash the reader or make it hold more than the file warrants.
func TestFlippedBytes(t *testing.T) {
	var pickle bytes.Buffer
	if err := WritePyTorch(&pickle, synthetic().Traces...); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	good := pickle.Bytes()
	bad := make([]byte, len(good))
	for i := range 20000 {
		copy(bad, good)
		for range 1 + i%4 {
			bad[rng.IntN(len(bad))] = byte(rng.Uint32())
		}
		f, err := Read(bytes.NewReader(bad), "some.file")
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("round %d: %q", i, err)
			}
			continue
		}
		for _, tr := range f.Traces {
			checkTrace(t, tr)
		}
	}
}

// checkTrace asserts what every Trace promises.
func checkTrace(t testing.TB, tr *Trace) {
	t.Helper()
	if len(tr.Stacks) == 0 || len(tr.Stacks[0]) != 0 || len(tr.Pools) == 0 || tr.Pools[0] != (PoolID{}) {
		t.Fatalf("no empty stack or default pool: %v %v", tr.Stacks, tr.Pools)
	}
	for _, s := range tr.Stacks {
		for _, f := range s {
			if int(f) >= len(tr.Frames) {
				t.Fatalf("frame %d of %d", f, len(tr.Frames))
			}
		}
	}
	ref := func(stream, pool, stack uint32) {
		if int(stream) >= len(tr.Streams) || int(pool) >= len(tr.Pools) || int(stack) >= len(tr.Stacks) {
			t.Fatalf("stream %d of %d, pool %d of %d, stack %d of %d", stream, len(tr.Streams), pool, len(tr.Pools), stack,
				len(tr.Stacks))
		}
	}
	for i := range tr.Events {
		e := &tr.Events[i]
		ref(e.Stream, e.Pool, e.Stack)
		if e.Kind >= event.NumKinds {
			t.Fatalf("event %d of kind %d", i, e.Kind)
		}
	}
	for _, segs := range [][]Segment{tr.InitialSegments, tr.Final} {
		for i := range segs {
			ref(segs[i].Stream, segs[i].Pool, segs[i].Stack)
			// Cistern's own files are taken at their word: spare chunks, which lie nowhere, are all at 0.
			if tr.Format != FormatCistern && i > 0 && segs[i].Addr-segs[i-1].Addr < segs[i-1].Size {
				t.Fatalf("segments overlap: %+v %+v", segs[i-1], segs[i])
			}
			for _, b := range segs[i].Blocks {
				ref(b.Stream, b.Pool, b.Stack)
			}
		}
	}
	for i, b := range tr.Initial {
		ref(b.Stream, b.Pool, b.Stack)
		if tr.Format != FormatCistern && i > 0 && b.Addr <= tr.Initial[i-1].Addr {
			t.Fatalf("initial blocks out of order: %+v %+v", tr.Initial[i-1], b)
		}
	}
	tr.PeakLive()
	tr.RecordedPeakReserved()
	if tr.Duration() < 0 {
		t.Fatal("a negative duration")
	}
}

// A file that unpacks to far more than any trace does is given up early.
func TestBombs(t *testing.T) {
	head := pk(byte(opBinbytes8), u64(1<<40))
	bomb := func(w io.WriteCloser, out *bytes.Buffer) []byte {
		w.Write(head)
		zeros := make([]byte, 1<<20)
		for range 256 {
			w.Write(zeros)
		}
		w.Close()
		return out.Bytes()
	}
	var g, z bytes.Buffer
	gw, _ := gzip.NewWriterLevel(&g, gzip.BestSpeed)
	refusedFile(t, bomb(gw, &g), "gzip: decompresses to more than 200 times its size")
	zw, err := zstd.NewWriter(&z)
	if err != nil {
		t.Fatal(err)
	}
	refusedFile(t, bomb(zw, &z), "zstd: decompresses to more than 200 times its size")
}

func TestWrongKindOfFile(t *testing.T) {
	for name, c := range map[string]struct{ file, want string }{
		"empty":     {"", "the file is empty; expected a PyTorch memory snapshot"},
		"json":      {"{\"segments\": []}", "byte 0: JSON; expected a PyTorch memory snapshot"},
		"png":       {"\x89PNG\r\n\x1a\n0000", "a PNG picture"},
		"zip":       {"PK\x03\x04xxxx", "a zip file (torch.save?)"},
		"text":      {"hello\n", "a file of unknown kind"},
		"html":      {"<!DOCTYPE html>", "HTML or XML"},
		"short":     {"\x1f\x8b", "gzip: unexpected EOF"},
		"other csv": {"a,b,c\n1,2,3\n", "a file of unknown kind"},
	} {
		t.Run(name, func(t *testing.T) { refusedFile(t, []byte(c.file), c.want) })
	}
	dir := t.TempDir()
	if _, err := ReadFile(dir); err == nil || !strings.Contains(err.Error(), "a directory; expected a PyTorch") {
		t.Errorf("directory: %v", err)
	}
	path := filepath.Join(dir, "missing")
	if _, err := ReadFile(path); err == nil || !strings.HasPrefix(err.Error(), path+": ") || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
}

// Reading holds at most twice the uncompressed file, and a constant.
func TestMemory(t *testing.T) {
	for _, path := range samples(t) {
		var f *File
		peak := peakHeap(func() { f = mustRead(t, path) })
		if limit := uint64(2*f.DecodedBytes + 4<<20); peak > limit {
			t.Errorf("%s: %d bytes held for %d", path, peak, f.DecodedBytes)
		}
	}
}

// Standard input that stays open does not hold up the report.
func TestStandardInput(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func(old *os.File) { os.Stdin = old }(os.Stdin)
	os.Stdin = r
	var z bytes.Buffer
	gw := gzip.NewWriter(&z)
	gw.Write(append(pk(byte(0xff)), make([]byte, 100)...))
	gw.Flush()
	if _, err := w.Write(z.Bytes()); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := ReadFile("-")
		done <- err
	}()
	select {
	case err := <-done:
		if err == nil || !strings.HasPrefix(err.Error(), "standard input: byte 2: ") {
			t.Error(err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("still waiting")
	}
	w.Close()
}
