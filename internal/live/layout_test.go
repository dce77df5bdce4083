package live

import (
	"bytes"
	"encoding/json"
	"fmt"
	"github.com/cistern-gpu/cistern/internal/latency"
	"reflect"
	"strings"
	"testing"
	"time"
)

// written is a page as a publisher writes it.
func written(tb testing.TB, id identity, devices []Device, details []Details) []byte {
	tb.Helper()
	b := make([]byte, pageBytes)
	at := time.Unix(1700000000, 5)
	put(b[gaugesAt+gaugesStep:], 1, encodeGauges(nil, at, 3, devices))
	text, err := encodeDetails(nil, at, details)
	if err != nil {
		tb.Fatal(err)
	}
	put(b[detailsAt+detailsStep:], 1, text)
	if err := encodeIdentity(b, id); err != nil {
		tb.Fatal(err)
	}
	return b
}

var someID = identity{Place: Place{"77", 3, 8}, Maker: 4, MakerStart: 5, PID: 6, Start: 7, Name: "python3", Args: []string{"python3", "train.py", ""}, Kind: KindCistern,
	Version: "0.5", Conf: "limit:1GiB"}

func someDevices() []Device {
	var slow latency.Histogram
	for i := range slow.Counts {
		slow.Counts[i] = uint64(1000 + i)
	}
	slow.Max = 14
	return []Device{
		{Ordinal: 0, UUID: [16]byte{1, 15: 2}, Name: "NVIDIA H200", Total: 1, Reserved: 2, Allocated: 3, Active: 4, Cached: 5, Paused: 6,
			PeakReserved: 7, PeakAllocated: 8, Limit: 9, DriverCalls: 10, Retries: 11, OOMs: 12, Requests: 13, Slow: slow},
		{Ordinal: 7, Name: strings.Repeat("n", nameBytes), Total: 1 << 63},
	}
}

func someDetails() []Details {
	return []Details{{Tags: []Use{{"weights", 3, 300}, {"", 1, 7}}, Stacks: []Use{{"a\nb", 1, 5}}}, {}}
}

func TestLayout(t *testing.T) {
	b := written(t, someID, someDevices(), someDetails())
	id, err := decodeIdentity(bytes.NewReader(b))
	if err != nil || !reflect.DeepEqual(id, someID) {
		t.Errorf("identity %+v, %v", id, err)
	}
	var p Process
	if err := decode(bytes.NewReader(b), true, 1, &p); err != nil {
		t.Fatal(err)
	}
	want := Process{Updated: time.Unix(1700000000, 5), Dropped: 3, Devices: someDevices()}
	want.Devices[0].Details = &Details{Tags: []Use{{"weights", 3, 300}, {"", 1, 7}}, Stacks: []Use{{"a\nb", 1, 5}}}
	want.Devices[1].Details = &Details{}
	if !reflect.DeepEqual(p, want) {
		t.Errorf("read\n%+v; want\n%+v", p, want)
	}
	// Not asked for, they are not read.
	p = Process{}
	if err := decode(bytes.NewReader(b), false, 1, &p); err != nil || p.Devices[0].Details != nil {
		t.Errorf("details %+v, %v", p.Devices[0].Details, err)
	}
}

// The newest part that is whole counts, whatever the writer was doing when it stopped.
func TestTorn(t *testing.T) {
	b := written(t, someID, someDevices(), nil)
	device := func(reserved uint64) []byte {
		return encodeGauges(nil, time.Unix(1, 0), 0, []Device{{Reserved: reserved}})
	}
	put(b[gaugesAt:], 2, device(222))
	reserved := func() uint64 {
		t.Helper()
		var p Process
		if err := decode(bytes.NewReader(b), false, 1, &p); err != nil || len(p.Devices) == 0 {
			t.Fatalf("%+v, %v", p, err)
		}
		return p.Devices[0].Reserved
	}
	if r := reserved(); r != 222 {
		t.Errorf("reserved is %d, want the newest", r)
	}
	whole := bytes.Clone(b)
	next := bytes.Clone(b)
	put(next[gaugesAt+gaugesStep:], 3, device(333))
	// The writer stops after any of the bytes, in the order in which they are written: number gone, contents, size, checksum,
	// number.
	part := next[gaugesAt+gaugesStep:]
	contents := head + len(device(0))
	var order []int
	for i := head; i < contents; i++ {
		order = append(order, i)
	}
	for i := 16; i < 24; i++ {
		order = append(order, i)
	}
	for i := 8; i < 16; i++ {
		order = append(order, i)
	}
	copy(b[gaugesAt+gaugesStep:][:8], make([]byte, 8))
	for _, i := range order {
		b[gaugesAt+gaugesStep+i] = part[i]
		if r := reserved(); r != 222 {
			t.Fatalf("reserved is %d after byte %d", r, i)
		}
	}
	copy(b[gaugesAt+gaugesStep:][:8], part[:8])
	if r := reserved(); r != 333 {
		t.Errorf("reserved is %d in the end", r)
	}
	// A change of any bit of a part makes it none.
	for bit := range contents * 8 {
		copy(b, whole)
		b[gaugesAt+bit/8] ^= 1 << (bit % 8)
		if r := reserved(); r != 2 {
			t.Fatalf("reserved is %d after bit %d changed, want the part before", r, bit)
		}
	}
}

// Whatever there is to tell, it fits, and its sum is right.
func TestManyHolders(t *testing.T) {
	var stacks []Use
	total := Use{}
	for i := range 5000 {
		u := Use{fmt.Sprintf("%d%s", i, strings.Repeat("\nframe of a deep stack <with> \x1b[2J", 200)), int64(i % 3), uint64(i*7919%5000) << 10}
		stacks = append(stacks, u)
		total.Blocks += u.Blocks
		total.Bytes += u.Bytes
	}
	devices := make([]Device, maxDevices+3)
	details := make([]Details, len(devices))
	for i := range details {
		details[i].Stacks = stacks
	}
	b := written(t, someID, devices, details)
	var p Process
	if err := decode(bytes.NewReader(b), true, 1, &p); err != nil {
		t.Fatal(err)
	}
	if len(p.Devices) != maxDevices {
		t.Errorf("%d devices", len(p.Devices))
	}
	for _, d := range p.Devices {
		sum := Use{}
		for i, u := range d.Details.Stacks {
			sum.Blocks += u.Blocks
			sum.Bytes += u.Bytes
			if strings.Contains(u.Name, "\x1b") {
				t.Fatalf("%q would reach a terminal", u.Name)
			}
			if i > 0 && d.Details.Stacks[i-1].Bytes < u.Bytes && u.Name != MoreName {
				t.Fatal("not the most bytes first")
			}
		}
		if sum != total {
			t.Errorf("they add up to %+v, want %+v", sum, total)
		}
	}
}

func TestIdentityBounded(t *testing.T) {
	id := someID
	id.Name = "evil\x1b]0;title\a" + strings.Repeat("x", 1<<16)
	id.Args = make([]string, 10000)
	for i := range id.Args {
		id.Args[i] = strings.Repeat("\u0001\xff", 1000)
	}
	id.Conf = strings.Repeat("\"", 1<<20)
	b := make([]byte, pageBytes)
	if err := encodeIdentity(b, id); err != nil {
		t.Fatal(err)
	}
	got, err := decodeIdentity(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(got.Name+strings.Join(got.Args, ""), "\x1b\a\u0001") || len(got.Name) > 2*nameMax || !strings.HasPrefix(got.Name, "evil") {
		t.Errorf("%+v", got)
	}
}

func TestNotAPage(t *testing.T) {
	good := written(t, someID, someDevices(), someDetails())
	for name, change := range map[string]func([]byte) []byte{
		"its status segment has layout 9":              func(b []byte) []byte { le.PutUint64(b[8:], 9); return b },
		"not a status segment of Cistern":              func(b []byte) []byte { b[0] ^= 1; return b },
		"too short":                                    func(b []byte) []byte { return b[:12] },
		"not written yet":                              func(b []byte) []byte { return make([]byte, pageBytes) },
		"its status segment does not name its process": func(b []byte) []byte { b[identityAt+30] ^= 1; return b },
	} {
		if _, err := decodeIdentity(bytes.NewReader(change(bytes.Clone(good)))); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, change := range map[string]func([]byte) []byte{
		"too short":        func(b []byte) []byte { return b[:gaugesAt+100] },
		"bytes of figures": func(b []byte) []byte { put(b[gaugesAt:], 9, make([]byte, gaugesHead+7)); return b },
		"bytes of details": func(b []byte) []byte { put(b[detailsAt:], 9, []byte("x")); return b },
		"invalid details": func(b []byte) []byte {
			put(b[detailsAt:], 9, append(make([]byte, 8), "[[{"...))
			le.PutUint64(b[detailsAt+head:], uint64(time.Unix(1700000000, 0).UnixNano()))
			put(b[detailsAt:], 9, bytes.Clone(b[detailsAt+head:][:11]))
			return b
		},
	} {
		var p Process
		if err := decode(bytes.NewReader(change(bytes.Clone(good))), true, 1, &p); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzPage: whatever a process calls its page, reading it ends, in bounds.
func FuzzPage(f *testing.F) {
	good := written(f, someID, someDevices(), someDetails())
	f.Add(good[:gaugesAt], good[gaugesAt+gaugesStep:][:head+gaugesHead+2*recordBytes], good[detailsAt+detailsStep:][:200], true)
	f.Add(good[:100], []byte{1}, []byte{2}, false)
	f.Fuzz(func(t *testing.T, start, gauges, details []byte, checked bool) {
		parts := pieces{0: start, gaugesAt: gauges, detailsAt: details}
		if checked { // otherwise nearly everything would fail there
			for at, b := range map[int64][]byte{identityAt: start[min(len(start), identityAt):], gaugesAt: gauges, detailsAt: details} {
				if len(b) > head && le.Uint64(b[16:]) <= uint64(len(b)-head) {
					b = bytes.Clone(b)
					le.PutUint64(b[8:], checksum(le.Uint64(b), b[head:][:le.Uint64(b[16:])]))
					parts[at] = b
				}
			}
		}
		if id, err := decodeIdentity(parts); err == nil {
			if len(id.Args) > argsMax || strings.ContainsAny(id.Name+id.Conf+strings.Join(id.Args, ""), "\x1b\x00\n") {
				t.Errorf("identity %+v", id)
			}
			if text, err := json.Marshal(id); err != nil || len(text) > 1<<20 {
				t.Errorf("%d bytes of identity, %v", len(text), err)
			}
		}
		var p Process
		if err := decode(parts, true, 1, &p); err != nil {
			return
		}
		if len(p.Devices) > maxDevices {
			t.Errorf("%d devices", len(p.Devices))
		}
		for _, d := range p.Devices {
			if strings.ContainsAny(d.Name, "\x1b\x00\n") {
				t.Errorf("name %q", d.Name)
			}
			if d.Details != nil {
				for _, u := range d.Details.Tags {
					if strings.ContainsAny(u.Name, "\x1b\x00") || len(u.Name) > 3*useMax {
						t.Errorf("tag %q", u.Name)
					}
				}
			}
		}
	})
}

// pieces is a page of which only some places are not zero.
type pieces map[int64][]byte

func (p pieces) ReadAt(b []byte, at int64) (int, error) {
	clear(b)
	for _, from := range []int64{0, identityAt, gaugesAt, detailsAt} {
		piece := p[from]
		if at >= from && at < from+int64(len(piece)) {
			copy(b, piece[at-from:])
		}
	}
	return len(b), nil
}
