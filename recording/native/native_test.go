package native_test

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// A file that was cut at any byte is readable up to its last whole block, and says that it was cut.
func TestCisternCutAnywhere(t *testing.T) {
	f := recordingtest.Synthetic()
	file, whole := recordingtest.Written(t, f)
	for n := len(native.Magic); n < len(file); n++ {
		got, err := open.Read(bytes.NewReader(file[:n]), "some.file")
		want := whole(n)
		if want == 0 && err == nil && len(got.Traces[0].Failures) > 0 {
			// What the process said of a failure is worth having without the events that led to it.
			if f := got.Traces[0].Failures[0]; f.Event != -1 || len(got.Traces[0].Events) != 0 {
				t.Fatalf("%d bytes: failure at event %d of %d", n, f.Event, len(got.Traces[0].Events))
			}
			continue
		}
		if want == 0 {
			if err == nil || !strings.Contains(err.Error(), "the file was cut off before its first event") {
				t.Fatalf("%d bytes: %v", n, err)
			}
			continue
		}
		if len(file)-n <= 16 { // inside the trailer: every block is whole
			if err == nil {
				t.Fatalf("%d of %d bytes: no error for half a trailer", n, len(file))
			}
			continue
		}
		if err != nil {
			t.Fatalf("%d of %d bytes: %v", n, len(file), err)
		}
		tr := got.Traces[0]
		if len(tr.Events) != want {
			t.Fatalf("%d bytes: %d events; expected %d", n, len(tr.Events), want)
		}
		for i := range tr.Events {
			if tr.Events[i] != f.Traces[0].Events[i] {
				t.Fatalf("%d bytes: event %d is %+v", n, i, tr.Events[i])
			}
		}
		if tr.Final != nil || !strings.Contains(strings.Join(tr.Notes, "; "), "the file was cut off after byte") {
			t.Fatalf("%d bytes: final state %v, notes %q", n, tr.Final, tr.Notes)
		}
		recordingtest.Check(t, tr)
	}
	// What a crash leaves behind where the file system had made room: zeros.
	cut := len(file) / 2
	zeros := append(append([]byte(nil), file[:cut]...), make([]byte, 5000)...)
	if at := lastBlock(file, cut); at > 0 {
		got, err := open.Read(bytes.NewReader(append(append([]byte(nil), file[:at]...), make([]byte, 5000)...)), "some.file")
		if err != nil || len(got.Traces[0].Events) != whole(at) {
			t.Fatalf("zeros from byte %d: %v", at, err)
		}
	}
	recordingtest.Refused(t, zeros, "checksum")
}

// lastBlock is where the last block that begins before byte n does.
func lastBlock(file []byte, n int) int {
	at, off := 0, len(native.Magic)
	for off < n {
		at = off
		off += native.BlockHeader + int(binary.LittleEndian.Uint32(file[off+1:]))
	}
	return at
}

// A flipped bit anywhere is an error, never another trace.
func TestCisternFlips(t *testing.T) {
	file, _ := recordingtest.Written(t, recordingtest.Synthetic())
	bad := make([]byte, len(file))
	for i := range file {
		for bit := range 8 {
			copy(bad, file)
			bad[i] ^= 1 << bit
			if _, err := open.Read(bytes.NewReader(bad), "some.file"); err == nil {
				t.Fatalf("bit %d of byte %d flipped and not noticed", bit, i)
			}
		}
	}
}

// block is a block with the right checksum, whatever is in it.
func block(typ byte, payload []byte) []byte {
	b := binary.LittleEndian.AppendUint32([]byte{typ}, uint32(len(payload)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	b = binary.LittleEndian.AppendUint32(b, crc32.Update(crc32.Checksum(b[:9], native.Castagnoli), native.Castagnoli, payload))
	return append(b, payload...)
}

func TestHostileCistern(t *testing.T) {
	head := func(blocks ...[]byte) []byte {
		return append([]byte(native.Magic), bytes.Join(blocks, nil)...)
	}
	uv := func(ns ...uint64) (b []byte) {
		for _, n := range ns {
			b = binary.AppendUvarint(b, n)
		}
		return b
	}
	// ended is a whole file of one trace without events.
	ended := func(blocks ...[]byte) []byte {
		b := head(blocks...)
		return append(binary.LittleEndian.AppendUint64(append(b, block(native.BlockIndex, uv(0, 0))...), uint64(len(b))), native.Trailer...)
	}
	tr := block(native.BlockTrace, append(append(uv(0, 0, 0), 1, 0, 0, 0, 1), make([]byte, 8)...))
	streams := block(native.BlockStreams, append(uv(0, 1), make([]byte, 8)...))
	pools := block(native.BlockPools, append(uv(0, 1), make([]byte, 16)...))
	stacks := block(native.BlockStacks, uv(0, 1, 0))
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"a later version": {[]byte("\x89CIST\r\n\x07"), "byte 7: version 7 of Cistern's format; expected 1"},
		"a block of 4 GiB": {head([]byte{native.BlockNotes, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0}),
			"byte 8: a block of 4294967295 bytes"},
		"a type that is none":     {head(block(99, nil)), "byte 8: block of type 99: unknown"},
		"events before the trace": {head(block(native.BlockEventsType, uv(0, 0, 1))), "trace 0 of 0"},
		"a table that is none":    {head(tr, block(native.BlockStacks, uv(5, 1))), "table 5 of 1"},
		"2^60 streams":            {head(tr, block(native.BlockStreams, uv(0, 1<<60))), "ends early or refers to what is not there"},
		"2^60 stacks":             {head(tr, block(native.BlockStacks, uv(0, 1<<60))), "ends early"},
		"a stack of 2^60":         {head(tr, block(native.BlockStacks, uv(0, 1, 1<<60))), "ends early"},
		"2^60 blocks":             {head(tr, block(native.BlockBlocks, uv(0, 0, 0, 1<<60))), "ends early"},
		"a frame of no string":    {head(tr, block(native.BlockFrames, uv(0, 1, 0, 0, 0))), "ends early or refers"},
		"2^40 events":             {head(tr, block(native.BlockEventsType, uv(0, 0, 1<<40))), "1099511627776 events from number 0"},
		"an event of no stream": {head(tr, pools, stacks, block(native.BlockEventsType, append(uv(0, 0, 1), 1, 1, 1, 0, 2, 0, 0, 1, 0,
			0))), "event 0 of device 0: the event is of an unknown kind or refers to what is not there"},
		"an event of kind 15": {head(tr, streams, pools, stacks, block(native.BlockEventsType, append(uv(0, 0, 1), 1, 15, 1, 0, 2, 0,
			0, 1, 0, 0))), "event 0 of device 0: the event is of an unknown kind"},
		"a final block of no stream": {head(tr, streams, pools, stacks, block(native.BlockBlocks, append(uv(0, 0, 0, 1, 0, 1, 1, 9, 0,
			0), 1)), block(native.BlockEventsType, append(uv(0, 0, 1), 1, 1, 1, 0, 2, 0, 0, 1, 0, 0))),
			"a segment or block of device 0 refers to what is not there"},
		"an event of no tag": {head(tr, streams, pools, stacks, block(native.BlockEventsType, append(uv(0, 0, 1), 1, 0x81, 1, 0, 2, 0, 0, 1, 0,
			4, 0, 1, 0, 0))), "event 0 of device 0: the event is of an unknown kind or refers to what is not there"},
		"a label that was not before": {head(tr, streams, pools, stacks, block(native.BlockEventsType, append(uv(0, 0, 1), 1, 0x81, 1, 0, 2, 0,
			0, 1, 0, 1, 1))), "event 0 of device 0"},
		"a tag of 17 bits": {head(tr, streams, pools, stacks, block(native.BlockEventsType, append(uv(0, 0, 1), 1, 0x81, 1, 0, 2, 0,
			0, 1, 0, 6, 0, 0x80, 0x80, 4, 0, 0))), "event 0 of device 0"},
		"2^60 names":           {head(tr, block(native.BlockNames, uv(0, 0, 1<<60))), "ends early"},
		"a list of names":      {head(tr, block(native.BlockNames, uv(0, 3, 0))), "list 3 of names"},
		"257 libraries":        {head(tr, block(native.BlockNames, append(uv(0, 1, 257), make([]byte, 257)...))), "0 tags and 257 libraries"},
		"labels of no block":   {head(tr, block(native.BlockLabels, uv(0, 0, 0, 1, 0, 1, 1))), "ends early or refers"},
		"labels of no segment": {head(tr, block(native.BlockLabels, uv(0, 1, 7, 0))), "list 1, segment 7 of blocks"},
		"a failure of no tag": {head(tr, block(native.BlockFailure, append(append(uv(0, 0), 11), `{"tag":1}  `...))),
			"a block or failure of device 0 has a label, stack or event that is not there"},
		"a failure at event -2": {head(tr, block(native.BlockFailure, append(append(uv(0, 0), 12), `{"event":-2}`...))),
			"a block or failure of device 0"},
		"a failure that is not JSON": {head(tr, block(native.BlockFailure, append(append(uv(0, 0), 2), "{\n"...))), "a failure: unexpected end of JSON"},
		"a failure of many steps": {head(tr, bytes.Repeat(block(native.BlockFailure, append(uv(0, 1, 1e6-1), bytes.Repeat([]byte("{},"),
			333333)...)), 12)), "needs more memory"},
		"a failure without an end": {ended(tr, block(native.BlockFailure, append(uv(0, 1), 1, '{'))), "a failure of device 0 has no end"},
		"a tag 0 with a name": {head(tr, block(native.BlockNames, append(uv(0, 0, 1, 1), 'x')), streams, pools, stacks, block(native.BlockEventsType,
			append(uv(0, 0, 1), 1, 1, 1, 0, 2, 0, 0, 1, 0, 0))), "the first stack, pool, tag or library of device 0 is one"},
		"an index that lies": {head(tr, block(native.BlockIndex, uv(0, 7))), "device 0 has 0 events; expected 7"},
		"300 traces":         {head(bytes.Repeat(tr, 2)), "expected trace 1"},
	} {
		t.Run(name, func(t *testing.T) { recordingtest.Refused(t, c.file, c.want) })
	}
}

// Indices, kinds and extreme numbers survive.
func TestCisternRandomEvents(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	tr := &recording.Trace{Format: recording.FormatRMM, Device: 3, Streams: []uint64{0, 1, 2, 1 << 63}, Pools: []recording.PoolID{{}, {1, 2}},
		Stacks: []recording.Stack{nil}, Settings: recording.Settings{MaxSplitSize: -1}}
	number := func() uint64 { return rng.Uint64() >> rng.IntN(65) << rng.IntN(20) }
	tr.Tags, tr.Libraries = make([]string, 1<<16), make([]string, 1<<8)
	for range 50_000 {
		e := event.Event{Addr: number(), Size: number(), TimeUS: int64(number()), Stream: uint32(rng.IntN(4)),
			Pool: uint32(rng.IntN(2)), Kind: event.Kind(rng.IntN(int(event.NumKinds)))}
		switch rng.IntN(4) {
		case 0:
			e.Tag, e.Library, e.Thread = uint16(rng.Uint32()), uint8(rng.Uint32()), uint32(number())
		case 1:
			e.Tag, e.Thread = uint16(rng.IntN(3)), uint32(rng.IntN(2))
		}
		if rng.IntN(4) == 0 {
			e.Handle, e.Flags = number(), uint8(rng.Uint32())
		}
		tr.Events = append(tr.Events, e)
		if rng.IntN(3) == 0 {
			e.Kind = event.FreeCompleted
			e.Handle, e.Flags = 0, 0
			tr.Events = append(tr.Events, e)
		}
	}
	var out bytes.Buffer
	if err := native.Write(&out, &recording.File{Traces: []*recording.Trace{tr}}); err != nil {
		t.Fatal(err)
	}
	f, err := open.Read(&out, "x")
	if err != nil {
		t.Fatal(err)
	}
	got := f.Traces[0]
	if len(got.Events) != len(tr.Events) || got.Final != nil || got.Source != recording.FormatRMM {
		t.Fatalf("%d events, final %v, source %q", len(got.Events), got.Final, got.Source)
	}
	for i := range got.Events {
		if got.Events[i] != tr.Events[i] {
			t.Fatalf("event %d: %+v; expected %+v", i, got.Events[i], tr.Events[i])
		}
	}
}

func TestCisternRoundTrip(t *testing.T) {
	check := func(t *testing.T, f *recording.File) {
		var out bytes.Buffer
		if err := native.Write(&out, f); err != nil {
			t.Fatal(err)
		}
		size := out.Len()
		again, err := open.Read(&out, f.Path)
		if err != nil {
			t.Fatal(err)
		}
		if again.Format != recording.FormatCistern || len(again.Traces) != len(f.Traces) {
			t.Fatalf("%d traces of %s", len(again.Traces), again.Format)
		}
		for i, g := range again.Traces {
			if g.Source != recording.FormatPyTorch {
				t.Errorf("source %q", g.Source)
			}
			if d := cmp.Diff(f.Traces[i], g, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(recording.Trace{}, "Format", "Source", "StoredBytes",
				"Events")); d != "" {
				t.Fatalf("(-want +got):\n%s", d)
			}
			for j := range g.Events {
				if g.Events[j] != f.Traces[i].Events[j] {
					t.Fatalf("event %d: %+v; expected %+v", j, g.Events[j], f.Traces[i].Events[j])
				}
			}
		}
		if st, err := os.Stat(f.Path); err == nil && int64(size) >= st.Size() {
			t.Errorf("%d bytes; the gzipped pickle has %d", size, st.Size())
		} else if err == nil {
			t.Logf("%d bytes, gzipped pickle %d", size, st.Size())
		}
	}
	t.Run("synthetic", func(t *testing.T) { check(t, recordingtest.Synthetic()) })
	for _, path := range recordingtest.Samples(t) {
		t.Run(filepath.Base(path), func(t *testing.T) { check(t, recordingtest.Read(t, path)) })
	}
}

// The identity of a process is read back, and made harmless.
func TestIdentity(t *testing.T) {
	id := &recording.Identity{Job: "77\x1b", Run: "r", Requeue: 1, Restart: 2, Launcher: "slurm", Node: "n1", NodeRank: 3, Rank: 25, LocalRank: 1, World: 64,
		PID: 4711, Coordinates: map[string]int{"dp": 3, "\x07": 1}, Disagreements: []string{"a\nb"}}
	f := &recording.File{Traces: []*recording.Trace{{Stacks: []recording.Stack{nil}, Pools: []recording.PoolID{{}}, Streams: []uint64{0}, Identity: id,
		Events: []event.Event{{Kind: event.Alloc, Size: 512, Addr: 512}}}}}
	var b bytes.Buffer
	if err := native.Write(&b, f); err != nil {
		t.Fatal(err)
	}
	got, err := native.Read(&b, "f")
	if err != nil {
		t.Fatal(err)
	}
	want := *id
	want.Job, want.Coordinates, want.Disagreements = "77\ufffd", map[string]int{"dp": 3, "\ufffd": 1}, []string{"a\ufffdb"}
	if d := cmp.Diff(&want, got.Traces[0].Identity); d != "" {
		t.Error(d)
	}
	id.Job = strings.Repeat("x", 1<<20)
	if err := native.Write(&b, f); err == nil || !strings.Contains(err.Error(), "at most 65536 fit") {
		t.Error(err)
	}
}
