package pytorch_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

func TestHostilePickles(t *testing.T) {
	one := recordingtest.Entry("alloc", 4096, 512)
	many := func(n int, b ...byte) []byte { return bytes.Repeat(b, n) }
	for _, c := range []struct {
		name string
		file []byte
		want string
	}{
		{"nested lists", recordingtest.Pickle(many(1_000_000, ']', '(')), "byte 2003: nested more than 1000 deep"},
		{"nested lists without marks", recordingtest.Pickle(many(60_000_000, ']')), "needs more memory"},
		{"nested tuples", recordingtest.Pickle(append(many(1_000_000, ')'), many(1_000_000, pytorch.OpTuple1)...)), "needs more memory"},
		{"marks only", recordingtest.Pickle(many(1_000_000, '(')), "nested more than 1000 deep"},
		{"a stack of Nones", recordingtest.Pickle('(', many(60_000_000, 'N')), "needs more memory"},
		{"a string of 2^63 bytes", recordingtest.Pickle(byte(pytorch.OpBinunicode8), recordingtest.U64(1<<63)), "a string of 9223372036854775808 bytes"},
		{"a string longer than the file", recordingtest.Pickle(byte(pytorch.OpBinunicode), recordingtest.U32(1<<20), many(1000, 'x')), "ends inside BINUNICODE"},
		{"bytes of 2^63", recordingtest.Pickle(byte(pytorch.OpBinbytes8), recordingtest.U64(1<<63)), "ends inside BINBYTES8"},
		{"an integer of 2^31 bytes", recordingtest.Pickle(byte(pytorch.OpLong4), recordingtest.U32(1<<31)), "an integer of 2147483648 bytes"},
		{"a memo entry far out", recordingtest.Pickle(']', byte(pytorch.OpLongBinput), recordingtest.U32(1<<32-1)), "byte 3: memo entry 4294967295 after 0"},
		{"a memo entry that is not there", recordingtest.Pickle(byte(pytorch.OpLongBinget), recordingtest.U32(77)), "memo entry 77 does not exist"},
		{"a memo entry in a gap", recordingtest.Pickle(']', 'q', byte(9), 'h', byte(3)), "memo entry 3 does not exist"},
		{"a million memo leaps", recordingtest.Pickle(']', leaps(200_000)), "needs more memory"},
		{"a list inside itself", recordingtest.Pickle(']', byte(pytorch.OpMemoize), '(', 'h', byte(0), 'e', '.'), "holds a list; expected a snapshot"},
		{"a billion laughs", recordingtest.Pickle(laughs(), '.'), "expected a snapshot"},
		{"a dict of itself", recordingtest.Pickle('}', byte(pytorch.OpMemoize), '(', "a", 'h', byte(0), 'u', '.'), "no device_traces"},
		{"STOP at once", recordingtest.Pickle('.'), "holds nothing"},
		{"two values", recordingtest.Pickle('}', '}', '.'), "byte 4: the pickle holds a dict"},
		{"data after STOP", append(recordingtest.Around(one), '.'), "data after the pickle's end"},
		{"APPENDS to nothing", recordingtest.Pickle('e'), "APPENDS without a MARK"},
		{"SETITEMS of one", recordingtest.Pickle('}', '(', "a", 'u', '.'), "a key without a value"},
		{"a number as key", recordingtest.Pickle('}', '(', 1, 2, 'u', '.'), "a key is an int"},
		{"protocol 0", []byte("(dp0\nS'a'\np1\nI1\ns."), "byte 0: a pickle of protocol 0 or 1?"},
		{"protocol 9", []byte{pytorch.OpProto, 9, '.'}, "pickle protocol 9; expected 2 to 5"},
		{"no opcode", recordingtest.Pickle(byte(0xff)), "byte 2: byte 0xff is not a pickle opcode"},
		{"DUP", recordingtest.Pickle(']', '2'), "opcode DUP; expected"},
		{"an entry without size", recordingtest.Around(recordingtest.Pickle('}', '(', "action", "alloc", "addr", 1, "stream", 0, 'u')[2:]),
			`event 0 of device 0: the trace entry has no "size"`},
		{"an entry without action", recordingtest.Around(append(one, recordingtest.Pickle('}', '(', "addr", 1, 'u')[2:]...)),
			`event 1 of device 0: the trace entry has no "action"`},
		{"an entry twice", recordingtest.Around(recordingtest.Pickle(one[:1], byte(pytorch.OpMemoize), one[1:], 'h', byte(0))[2:]), "in the file twice"},
		{"an entry inside an entry", recordingtest.Around(recordingtest.Pickle('}', '(', "action", ']', '(', one, 'e', 'u')[2:]), "action is a list"},
		{"an address below zero", recordingtest.Around(recordingtest.Entry("alloc", -1, 5)), "addr is a negative int"},
		{"a size of a string", recordingtest.Around(recordingtest.Pickle('}', '(', "action", "alloc", "addr", 1, "size", "big", 'u')[2:]), "size is a string"},
		{"a time of 2^63", recordingtest.Around(recordingtest.Pickle('}', '(', "action", "alloc", "time_us", byte(pytorch.OpLong1), []byte{9}, many(7, 0), byte(0x80), byte(0), 'u')[2:]),
			"time_us is 9223372036854775808; expected at most 2^63-1"},
		{"a stream of 72 bits", recordingtest.Around(recordingtest.Pickle('}', '(', "action", "alloc", "stream", byte(pytorch.OpLong1), []byte{9}, many(9, 1), 'u')[2:]),
			"stream is an int of more than 64 bits; expected an int of 64 bits"},
		{"a trace of numbers", recordingtest.Around(recordingtest.Pickle(1, 2, 3)[2:]), "a device's trace holds an int"},
		{"device_traces a number", recordingtest.Pickle('}', '(', "device_traces", 5, 'u', '.'), "device_traces is an int"},
		{"device_traces of numbers", recordingtest.Pickle('}', '(', "device_traces", ']', '(', 5, 'e', 'u', '.'), "device_traces holds an int"},
		{"device_traces twice", recordingtest.Pickle('}', '(', "device_traces", ']', "device_traces", ']', 'u', '.'), "a second time"},
		{"ten thousand settings", recordingtest.Pickle('}', '(', "allocator_settings", '}', '(', bytes.Repeat(recordingtest.Pickle("roundup_power2_divisions",
			'}')[2:], 10_000), 'u', 'u', '.'), "more than 1024 allocator settings"},
		{"no events", recordingtest.Around(nil), "the snapshot has no events"},
		{"300 devices", recordingtest.Pickle('}', '(', "device_traces", ']', '(', many(300, ']'), 'e', 'u', '.'), "more than 256 devices"},
		{"a segment beyond the address space", recordingtest.Pickle('}', '(', "segments", ']', '(', '}', '(', "address", -1&(1<<63-1),
			"total_size", 1<<63-1, 'u', '}', '(', "address", 8, "total_size", byte(pytorch.OpLong1), []byte{9}, many(8, 0xff),
			byte(0), 'u', 'e', 'u', '.'), "segment 1 ends beyond the address space"},
		{"a block outside its segment", recordingtest.Pickle('}', '(', "segments", ']', '(', '}', '(', "address", 4096, "total_size", 1024,
			"blocks", ']', '(', '}', '(', "address", 4096, "size", 2048, "state", "inactive", 'u', 'e', 'u', 'e', 'u', '.'),
			"block 0 of segment 0 lies outside it"},
		{"a state that is none", recordingtest.Pickle('}', '(', "segments", ']', '(', '}', '(', "blocks", ']', '(', '}', '(', "state",
			"sleeping", 'u'), `state is "sleeping"`},
		{"frames of numbers", recordingtest.Around(recordingtest.Pickle('}', '(', "action", "alloc", "frames", ']', '(', 7, 'e')[2:]), "frames holds an int"},
	} {
		t.Run(c.name, func(t *testing.T) { recordingtest.Refused(t, c.file, c.want) })
	}
}

// laughs are nine lists of ten references to the one before.
func laughs() []byte {
	b := []byte{']', pytorch.OpMemoize}
	for i := range 9 {
		b = append(b, ']', pytorch.OpMemoize, '(')
		for range 10 {
			b = append(b, 'h', byte(i))
		}
		b = append(b, 'e')
	}
	return b
}

// leaps are PUTs as far apart as a memo allows.
func leaps(n int) (b []byte) {
	for i := range n {
		b = append(append(b, pytorch.OpLongBinput), recordingtest.U32(uint32(i*pytorch.MemoChunk))...)
	}
	return b
}

// Every opcode by which a pickle can name, call or build anything is refused by its name, wherever it stands.
func TestOpcodesThatRunCode(t *testing.T) {
	for op, why := range pytorch.Refused {
		if why == "" {
			continue
		}
		arg := []byte("os\nsystem\n")
		want := fmt.Sprintf("opcode %s %s", pytorch.OpNames[op], why)
		recordingtest.Refused(t, recordingtest.Pickle(byte(op), arg, '.'), "byte 2: "+want)
		// In a part of the file that is otherwise skipped.
		recordingtest.Refused(t, recordingtest.Pickle('}', '(', "unknown", '}', '(', "a", byte(op), arg), want)
		recordingtest.Refused(t, recordingtest.Around(append(recordingtest.Entry("alloc", 1, 2), byte(op))), want)
	}
	if n := len(pytorch.Refused) - strings.Count(strings.Join(pytorch.Refused[:], "|")+"|", "||"); n < 15 {
		t.Errorf("%d opcodes refused; expected all 15", n)
	}
	recordingtest.Refused(t, []byte("\x80\x02cposix\nsystem\nq\x00X\x04\x00\x00\x00trueq\x01\x85q\x02Rq\x03."),
		"byte 2: opcode GLOBAL names a Python class or function")
}

// A file that ends too early is an error that says so, wherever it ends.
func TestTruncated(t *testing.T) {
	var pickle, packed bytes.Buffer
	if err := pytorch.Write(&pickle, recordingtest.Synthetic().Traces...); err != nil {
		t.Fatal(err)
	}
	z := gzip.NewWriter(&packed)
	z.Write(pickle.Bytes())
	z.Close()
	for n := range pickle.Len() {
		if _, err := open.Read(bytes.NewReader(pickle.Bytes()[:n]), "some.file"); err == nil {
			t.Fatalf("%d of %d bytes read without an error", n, pickle.Len())
		} else if n > 2 && !strings.Contains(err.Error(), fmt.Sprintf("some.file: byte %d: the file ends inside", n)) {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
	for n := range packed.Len() {
		if n == 0 {
			continue
		}
		if _, err := open.Read(bytes.NewReader(packed.Bytes()[:n]), "some.file"); err == nil {
			t.Fatalf("%d of %d bytes of gzip read without an error", n, packed.Len())
		}
	}
	recordingtest.Refused(t, packed.Bytes()[:packed.Len()-9], "gzip: unexpected EOF")
	for _, path := range []string{"../testdata/detection.pickle.gz"} {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 60 {
			recordingtest.Refusal(t, b[:1+len(b)*i/60])
		}
	}
}

// Flipped bytes never crash the reader or make it hold more than the file warrants.
func TestFlippedBytes(t *testing.T) {
	var pickle bytes.Buffer
	if err := pytorch.Write(&pickle, recordingtest.Synthetic().Traces...); err != nil {
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
		f, err := open.Read(bytes.NewReader(bad), "some.file")
		if err != nil {
			var e *recording.Error
			if !errors.As(err, &e) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("round %d: %q", i, err)
			}
			continue
		}
		for _, tr := range f.Traces {
			recordingtest.Check(t, tr)
		}
	}
}
