package top

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

const gib = 1 << 30

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func gpu(n byte) [16]byte { return [16]byte{1, 2, 15: n} }

// page is a process on Cistern with one device.
func page(pid int, device [16]byte, reserved uint64, calls uint64, at time.Time) Process {
	return Process{PID: pid, Start: uint64(pid), Name: fmt.Sprintf("p%d", pid), Kind: Cistern, Updated: at,
		Devices: []Device{{UUID: device, Name: "GPU", Total: 80 * gib, Reserved: reserved, Allocated: reserved / 2, PeakReserved: reserved, DriverCalls: calls}}}
}

func cardOf(n int, holders ...Holder) Card {
	c := Card{UUID: gpu(byte(n)), Index: n, Name: "GPU", Total: 80 * gib, Known: true, Utilization: 5, Holders: holders}
	for _, h := range holders {
		c.Used += h.Bytes
	}
	c.Free = c.Total - c.Used
	return c
}

var all = Choice{Sort: "pid", GPU: -1}

// Two sources meet in one row: the device's UUID and the process's number say which.
func TestMerge(t *testing.T) {
	two := page(7, gpu(1), 10*gib, 0, noon)
	two.Devices[0].Ordinal = 0 // CUDA_VISIBLE_DEVICES=1
	two.Devices = append(two.Devices, Device{Ordinal: 1, UUID: gpu(0), Name: "GPU", Total: 80 * gib, Reserved: 3 * gib})
	unlisted := page(8, gpu(9), gib, 0, noon)
	var s State
	s.Add(Look{At: noon, Processes: []Process{two, unlisted}, Programs: map[int]Program{9: {Start: 5, Name: "stranger"}}, Cards: []Card{
		cardOf(0, Holder{PID: 7, Bytes: 4 * gib, Known: true}, Holder{PID: 9, Bytes: 2 * gib, Known: true}),
		cardOf(1, Holder{PID: 7, Bytes: 9 * gib, Known: true}, Holder{PID: 9}), cardOf(2)}})
	got := s.Table(all)
	if len(got.GPUs) != 4 || got.GPUs[0].Reserved != 3*gib || got.GPUs[1].Reserved != 10*gib || got.GPUs[0].Processes != 2 || got.GPUs[3].Known || got.GPUs[3].Total != 80*gib {
		t.Errorf("GPUs %+v", got.GPUs)
	}
	if len(got.Rows) != 3 {
		t.Fatalf("rows %+v", got.Rows)
	}
	seven, eight, nine := got.Rows[0], got.Rows[1], got.Rows[2]
	if h := seven.Holdings; len(h) != 2 || h[0].GPU != 0 || h[0].Ordinal != 1 || h[0].Other != gib || !h[0].OtherKnown || h[1].GPU != 1 || h[1].OtherKnown {
		t.Errorf("process 7 holds %+v", seven.Holdings) // on GPU 1 the driver knows of less than was reserved by now
	}
	if m := seven.Sum; m.Reserved != 13*gib || m.Used != 13*gib || m.Other != gib || !m.Page {
		t.Errorf("process 7 in sum %+v", m)
	}
	if m := eight.Sum; m.UsedKnown || m.OtherKnown || eight.Holdings[0].GPU != 3 {
		t.Errorf("process 8 %+v", eight)
	}
	if nine.Kind != Untraced || nine.Title != "stranger" || nine.Sum.Page || nine.Sum.Used != 2*gib || len(nine.Holdings) != 2 || nine.Holdings[1].UsedKnown {
		t.Errorf("process 9 %+v", nine)
	}
	one := s.Table(Choice{Sort: "pid", GPU: 1})
	if len(one.Rows) != 2 || one.All != 3 || one.Rows[0].Sum.Reserved != 10*gib {
		t.Errorf("on GPU 1: %+v", one.Rows)
	}
}

// A program on Cistern that is traced as well is one row, with its own word.
func TestTracedOnCistern(t *testing.T) {
	own, traced := page(7, gpu(0), 10*gib, 5, noon), page(7, gpu(0), 11*gib, 50, noon)
	traced.Kind = Traced
	for _, order := range [][]Process{{own, traced}, {traced, own}} {
		var s State
		s.Add(Look{At: noon, Processes: order})
		got := s.Table(all)
		if len(got.Rows) != 1 || got.Rows[0].Kind != Cistern || got.Rows[0].Sum.Reserved != 10*gib || got.GPUs[0].Traced != 0 {
			t.Errorf("rows %+v of GPUs %+v", got.Rows, got.GPUs)
		}
	}
}

// A traced process may not know which of the cards its devices are.
func TestDevicesWithoutUUID(t *testing.T) {
	p := page(1, [16]byte{}, gib, 0, noon)
	second := p.Devices[0]
	second.Ordinal, second.Reserved = 1, 2*gib
	p.Devices = append(p.Devices, second)
	var s State
	for i := range 3 {
		p.Updated = noon.Add(time.Duration(i) * time.Second)
		p.Devices[0].DriverCalls, p.Devices[1].DriverCalls = uint64(10*i), uint64(30*i)
		s.Add(Look{At: p.Updated, Processes: []Process{p}, Cards: []Card{cardOf(0), {Index: 1, Known: true, Total: 5}}})
	}
	got := s.Table(all)
	if len(got.GPUs) != 4 || !got.GPUs[2].Unnamed() || got.GPUs[2].Reserved != gib || got.GPUs[3].Reserved != 2*gib || got.GPUs[1].Reserved != 0 {
		t.Errorf("GPUs %+v", got.GPUs)
	}
	if h := got.Rows[0].Holdings; h[0].Rate != 10 || h[1].Rate != 30 || h[0].Trend == h[1].Trend {
		t.Errorf("holds %+v", h)
	}
}

// Details that say nothing of memory that is held are not there yet.
func TestDetailsComeLate(t *testing.T) {
	p := page(1, gpu(0), gib, 0, noon)
	var s State
	for _, c := range []struct {
		details *Details
		held    uint64
		want    bool
	}{{nil, gib, false}, {&Details{}, gib, false}, {&Details{Kinds: []Use{{Name: "cuMemAlloc"}}}, gib, true}, {&Details{}, 0, true}} {
		p.Devices[0].Details, p.Devices[0].Allocated = c.details, c.held
		p.Updated = p.Updated.Add(time.Second)
		s.Add(Look{At: p.Updated, Processes: []Process{p}})
		if got := s.Table(all).Rows[0].Holdings[0].Details != nil; got != c.want {
			t.Errorf("%+v of %d bytes: %v, want %v", c.details, c.held, got, c.want)
		}
	}
	if !s.Answered(Wanted{All: true}) {
		t.Error("has not answered")
	}
}

// Every process has a simulated device of its own, and all of them one name.
func TestSimulated(t *testing.T) {
	sim := [16]byte([]byte("cistern-sim-gpu\x00"))
	var s State
	s.Add(Look{At: noon, Processes: []Process{page(1, sim, gib, 0, noon), page(2, sim, 3*gib, 0, noon)}})
	g := s.Table(all).GPUs
	if len(g) != 1 || !g[0].Simulated || g[0].Processes != 2 || g[0].Total != 160*gib || g[0].Reserved != 4*gib || g[0].Held() != 4*gib {
		t.Errorf("GPUs %+v", g)
	}
}

func TestRates(t *testing.T) {
	var s State
	rate := func() (float64, bool) { m := s.Table(all).Rows[0].Sum; return m.Rate, m.RateKnown }
	add := func(after time.Duration, updated time.Duration, calls uint64) {
		s.Add(Look{At: noon.Add(after), Processes: []Process{page(1, gpu(0), gib, calls, noon.Add(updated))}})
	}
	const sec = time.Second
	add(0, 0, 1000)
	if _, known := rate(); known {
		t.Error("one look tells no rate")
	}
	add(sec/2, 0, 1000)
	if _, known := rate(); known {
		t.Error("the same page twice tells no rate")
	}
	add(sec, sec/2, 1050)
	if r, known := rate(); !known || r != 100 {
		t.Errorf("%v %v, want 100", r, known)
	}
	for i := range 20 { // what was long ago does not count
		add(2*sec+time.Duration(i)*sec/4, 2*sec+time.Duration(i)*sec/4, 1050+10*uint64(i))
	}
	if r, _ := rate(); math.Abs(r-40) > 1e-9 {
		t.Errorf("%v, want 40", r)
	}
	add(7*sec, 7*sec, 3) // another life
	if _, known := rate(); known {
		t.Error("a counter that fell tells no rate")
	}
	add(8*sec, 8*sec, 4)
	if r, _ := rate(); r != 1 {
		t.Errorf("%v, want 1", r)
	}
	add(20*sec, 8*sec, 4)
	if r := s.Table(all).Rows[0]; r.Sum.RateKnown || !r.Stale || r.Age != 12*sec {
		t.Errorf("a page of 12 s ago: %+v", r)
	}
}

// A page of a process that has only begun was never refreshed.
func TestBeginning(t *testing.T) {
	p := page(1, gpu(0), 0, 0, time.Time{})
	p.Devices = nil
	var s State
	s.Add(Look{At: noon, Processes: []Process{p}})
	if r := s.Table(all).Rows[0]; r.Stale || r.Age != 0 {
		t.Errorf("%+v", r)
	}
}

func TestEndedProcessesVanish(t *testing.T) {
	var s State
	s.Add(Look{At: noon, Processes: []Process{page(1, gpu(0), gib, 0, noon), page(2, gpu(0), gib, 0, noon)}})
	again := page(2, gpu(0), gib, 0, noon)
	again.Start = 77 // the number is used again
	s.Add(Look{At: noon.Add(time.Second), Processes: []Process{again}})
	got := s.Table(all)
	if len(got.Rows) != 1 || got.Rows[0].Start != 77 || s.rows[id{2, 2}] != nil || s.rows[id{2, 77}] == nil || len(s.processes) != 1 {
		t.Errorf("%+v, %d remembered", got.Rows, len(s.processes))
	}
	if n := len(got.Rows[0].Trend.points); n != 1 {
		t.Errorf("it inherited a trend of %d points", n)
	}
}

func TestSort(t *testing.T) {
	mk := func(pid int, name string, m Memory) *Row {
		m.Page = name != "Stranger" && name != "stranger2"
		return &Row{PID: pid, Start: 1, Title: name, Sum: m}
	}
	s := State{rows: map[id]*Row{}}
	for _, r := range []*Row{
		mk(1, "b", Memory{Reserved: 5, Allocated: 1, Cached: 4, PeakReserved: 9, Rate: 2, RateKnown: true, Used: 6}),
		mk(2, "A", Memory{Reserved: 7, Allocated: 3, Cached: 1, PeakReserved: 7, Rate: 5, RateKnown: true, OOMs: 1}),
		mk(3, "c", Memory{Reserved: 4, Allocated: 2, Cached: 2, PeakReserved: 8}),
		mk(4, "Stranger", Memory{Used: 100}), mk(5, "stranger2", Memory{Used: 200})} {
		s.rows[id{r.PID, r.Start}] = r
	}
	for key, want := range map[Key]string{"reserved": "21354", "allocated": "23154", "cached": "13254", "peak": "13254", "used": "54213", "rate": "21345",
		"ooms": "21354", "pid": "12345", "name": "21345"} {
		order := func(reversed bool) (got string) {
			for _, r := range s.Table(Choice{Sort: key, GPU: -1, Reversed: reversed}).Rows {
				got += fmt.Sprint(r.PID)
			}
			return got
		}
		if got := order(false); got != want {
			t.Errorf("by %s: %s, want %s", key, got, want)
		}
		back := []byte(want)
		slices.Reverse(back)
		if got := order(true); got != string(back) && key != "rate" { // three of them have none
			t.Errorf("by %s, reversed: %s, want %s", key, got, back)
		}
	}
	for _, k := range Keys {
		if got, err := ParseKey(string(k)); err != nil || got != k {
			t.Errorf("%s: %v", k, err)
		}
	}
	if _, err := ParseKey("size"); err == nil || !strings.Contains(err.Error(), "cached, peak") {
		t.Errorf("%v", err)
	}
}

func TestFilter(t *testing.T) {
	r := Row{PID: 4711, Title: "train.py --lr 3", Name: "python3", Args: []string{"/opt/Venv/bin/python3", "train.py"}, Kind: Cistern}
	for text, want := range map[string]bool{"": true, "TRAIN": true, "venv": true, "711": true, "cist": true, "python3 train": false, "x": false} {
		if got := r.matches(text); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

func TestTrend(t *testing.T) {
	var tr Trend
	at := func(s int) time.Time { return noon.Add(time.Duration(s) * time.Second) }
	for i := range 8 {
		if i != 5 { // nothing was read then
			tr.add(at(i), uint64(i*10), uint64(i))
			tr.add(at(i).Add(300*time.Millisecond), uint64(i*10+1), 0)
		}
	}
	for _, c := range []struct {
		n    int
		span time.Duration
		want string
	}{
		{10, 10 * time.Second, "[-1 -1 1 11 21 31 41 41 61 71]"},
		{4, 4 * time.Second, "[41 41 61 71]"},
		{3, 12 * time.Second, "[-1 31 71]"},
		{1, time.Minute, "[71]"},
		{0, time.Minute, "[]"},
	} {
		if got := fmt.Sprint(tr.Columns(Held, c.n, c.span, at(7))); got != c.want {
			t.Errorf("%d columns over %v: %s, want %s", c.n, c.span, got, c.want)
		}
	}
	if got := fmt.Sprint(tr.Columns(Allocated, 3, 3*time.Second, at(7))); got != "[4 6 7]" {
		t.Errorf("allocated: %s", got)
	}
	// Steps of more than a second move together, not with every second.
	if a, b := fmt.Sprint(tr.Columns(Held, 3, 12*time.Second, at(4))), fmt.Sprint(tr.Columns(Held, 3, 12*time.Second, at(7))); a != b {
		t.Errorf("%s at 4 s, %s at 7 s", a, b)
	}
	for i := range 2000 {
		tr.add(at(10+i), 1, 1)
	}
	if n := len(tr.points); n > 601 {
		t.Errorf("%d points are remembered", n)
	}
}

func TestTitle(t *testing.T) {
	for _, c := range []struct{ name, args, want string }{
		{"python3", "/opt/venv/bin/python3.12|-u|train.py|--lr|3", "train.py --lr 3"},
		{"python3", "python3|-X|dev|-m|vllm.entrypoints|--port|1", "vllm.entrypoints --port 1"},
		{"python", "python|-c|import torch\nx()", "python -c import torch x()"},
		{"python", "python|-", "python -"},
		{"python", "python", "python"},
		{"bash", "bash|/srv/run.sh|a", "run.sh a"},
		{"VLLM::EngineCo", "VLLM::EngineCore", "VLLM::EngineCore"},
		{"app", "/usr/bin/app (deleted)|x", "app x"},
		{"app", "./app", "app"},
		{"pythonista", "pythonista|x.py", "pythonista x.py"},
		{"kworker", "", "kworker"},
		{"", "", "?"},
		{"evil", "ev\x1bil\u202e|\t", "ev?il?"},
	} {
		if got := title(c.name, slices.DeleteFunc(strings.Split(c.args, "|"), func(s string) bool { return s == "" })); got != c.want {
			t.Errorf("%q: %q, want %q", c.args, got, c.want)
		}
	}
}

func TestGather(t *testing.T) {
	use := func(name string, blocks int64, bytes uint64) Use {
		return Use{Name: name, Blocks: blocks, Bytes: bytes}
	}
	got := Gather([]Holding{{}, {Details: &Details{Tags: []Use{use("a", 1, 5), use("b", 2, 9)}}},
		{Details: &Details{Tags: []Use{use("a", 1, 6)}, Kinds: []Use{use("c", 1, 1)}}}})
	if fmt.Sprint(got.Tags) != "[{a 2 11} {b 2 9}]" || len(got.Kinds) != 1 {
		t.Errorf("%+v", got)
	}
	if Gather([]Holding{{}}) != nil {
		t.Error("details of nothing")
	}
}

// Rows that processes invent, of devices that there are not, cost no more than a machine's worth of devices; what NVML knows
// stays.
func TestInventedDevices(t *testing.T) {
	var s State
	for look := range 3 {
		l := Look{At: noon.Add(time.Duration(look) * time.Second), Cards: []Card{cardOf(0)}}
		for p := range 100 {
			x := Process{PID: p + 1, Start: uint64(look), Kind: Cistern}
			for d := range 64 {
				x.Devices = append(x.Devices, Device{UUID: [16]byte{9, byte(look), byte(p), byte(d), 1}, Reserved: gib})
			}
			l.Processes = append(l.Processes, x)
		}
		s.Add(l)
		got := s.Table(all)
		if len(got.GPUs) != mostGPUs || !got.GPUs[0].Known || len(got.Rows) != 100 {
			t.Fatalf("%d GPUs, %d rows; expected %d GPUs of 100 processes", len(got.GPUs), len(got.Rows), mostGPUs)
		}
		if n := len(s.trends); n > 2*mostGPUs {
			t.Fatalf("trends of %d devices are kept", n)
		}
		if p := s.Look().Problems; len(p) != 1 || !strings.Contains(p[0], "more than 256 GPUs") {
			t.Errorf("problems: %q", p)
		}
	}
}
