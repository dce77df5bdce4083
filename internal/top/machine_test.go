//go:build linux && cgo

package top

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/nvml"
	"github.com/cistern-gpu/cistern/internal/nvml/standin"
)

// machine is this one, with GPUs that a text describes and that can be changed.
func machine(t *testing.T, text string) (m *Machine, change func(string)) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "machine")
	change = func(text string) {
		if err := os.WriteFile(file+".new", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	change(text)
	t.Setenv("STANDIN_NVML", file)
	m = NewMachine(standin.Build(t))
	m.Timeout = time.Minute // a busy machine starts the library slowly
	t.Cleanup(m.Close)
	return m, change
}

// publish has this process publish one device.
func publish(t *testing.T, uuid [16]byte) {
	t.Helper()
	p, err := live.Of(0)
	if err != nil {
		t.Fatal(err)
	}
	p.Kind = Cistern
	calls := uint64(0)
	page, err := live.Publish(p, func(into []Device) []Device {
		calls += 10
		return append(into, Device{UUID: uuid, Name: "H200", Total: 1000, Reserved: 300, Allocated: 200, DriverCalls: calls})
	}, func() []Details { return []Details{{Tags: []Use{{Name: "weights", Blocks: 1, Bytes: 200}}}} })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(page.Close)
}

// await looks until the look is as wanted.
func await(t *testing.T, m *Machine, wanted Wanted, what string, ok func(*State, Table) bool) Table {
	t.Helper()
	var s State
	for begin := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		s.Add(m.Look(t.Context(), wanted))
		table := s.Table(all)
		if ok(&s, table) {
			return table
		}
		if time.Since(begin) > 2*time.Minute {
			t.Fatalf("%s: %+v of %+v", what, table, s.Look())
		}
	}
}

func row(table Table, pid int) *Row {
	for i := range table.Rows {
		if table.Rows[i].PID == pid {
			return &table.Rows[i]
		}
	}
	return nil
}

// What NVML says and what a process publishes come together; a process that only NVML knows is looked up; details come
// when they are asked for.
func TestMachine(t *testing.T) {
	sleeper := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	self, other := os.Getpid(), sleeper.Process.Pid
	var uuid [16]byte // of this run alone: another one publishes as well
	rand.Read(uuid[:])
	gpu := fmt.Sprintf("driver version=580.65.06\n"+
		"gpu uuid=GPU-%x-%x-%x-%x-%x name=\"NVIDIA H200\" bus=00000000:0F:00.0 total=1000 reserved=10 used=650 util=37 memutil=12\n",
		uuid[:4], uuid[4:6], uuid[6:8], uuid[8:10], uuid[10:])
	processes := fmt.Sprintf("process pid=%d bytes=350 name=/x/top.test\nprocess pid=%d bytes=200 name=/bin/sleep\nprocess pid=4194304 bytes=na name=/far/away\n", self, other)
	m, change := machine(t, gpu+processes)
	publish(t, uuid)
	table := await(t, m, Wanted{PID: self}, "both", func(s *State, table Table) bool {
		r := row(table, self)
		return r != nil && r.Sum.RateKnown && Gather(r.Holdings) != nil
	})
	if g := table.GPUs; len(g) < 1 || g[0].Name != "NVIDIA H200" || g[0].Used != 650 || g[0].Utilization != 37 || g[0].Reserved != 300 {
		t.Errorf("GPUs %+v", g)
	}
	if r := row(table, self); r.Kind != Cistern || r.Sum.Other != 50 || !r.Sum.OtherKnown || r.Sum.Rate <= 0 || Gather(r.Holdings).Tags[0].Name != "weights" {
		t.Errorf("this process %+v", r)
	}
	if r := row(table, other); r == nil || r.Title != "sleep 1000" || r.Kind != Untraced || r.Sum.Used != 200 || r.Start == 0 {
		t.Errorf("the sleeper %+v", r)
	}
	if r := row(table, 4194304); r == nil || r.Title != "away" || r.Sum.UsedKnown {
		t.Errorf("the process that is not to be seen %+v", r)
	}
	var s State
	s.Add(m.Look(t.Context(), Wanted{}))
	if n := s.Look().Strange; n != 1 {
		t.Errorf("%d processes are strange, want 1", n)
	}
	change(gpu)
	await(t, m, Wanted{}, "the others gone", func(s *State, table Table) bool {
		r := row(table, self)
		return r != nil && !r.Sum.UsedKnown && r.Holdings[0].Details == nil && row(table, other) == nil && row(table, 4194304) == nil
	})
}

// An NVML that hangs costs a look its timeout and no more; what processes publish is there all the same.
func TestMachineWithoutAnswers(t *testing.T) {
	const text = "driver version=580.65.06\ngpu uuid=GPU-00010203-0405-0607-0809-0a0b0c0d0e0f name=H200 bus=0 total=1000 reserved=10 used=650 util=37 memutil=12\n"
	m, change := machine(t, text+"hang call=nvmlDeviceGetUUID\n")
	m.Timeout = 200 * time.Millisecond
	publish(t, [16]byte{1})
	await(t, m, Wanted{}, "the page", func(s *State, table Table) bool {
		return row(table, os.Getpid()) != nil && strings.Contains(s.Look().NoCards, "NVML has not answered for")
	})
	// It was waited for, and is not again: the shortest of several looks says so on any machine.
	took := time.Hour
	for range 10 {
		begin := time.Now()
		m.Look(t.Context(), Wanted{})
		took = min(took, time.Since(begin))
	}
	if took >= m.Timeout {
		t.Errorf("the shortest of ten looks took %v", took)
	}
	change(text)
	await(t, m, Wanted{}, "an answer", func(s *State, table Table) bool { return s.Look().NoCards == "" && len(s.Look().Cards) == 1 })
}

// Without NVML the reason is shown, and asked again only once in a while.
func TestMachineWithoutNVML(t *testing.T) {
	m := NewMachine(filepath.Join(t.TempDir(), "libnvidia-ml.so.1"))
	defer m.Close()
	l := m.Look(t.Context(), Wanted{})
	if !strings.Contains(l.NoCards, "cannot open shared object file") || l.NoPages != "" {
		t.Errorf("%+v", l)
	}
	when := m.answered
	if m.Look(t.Context(), Wanted{}); m.answered != when && m.answered.Sub(when) < openEvery {
		t.Error("opened again at once")
	}
}

// An answer that is there counts, however long the rest of a look took, and also when it is to end.
func TestMachineAnsweredMeanwhile(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	for _, ctx := range []context.Context{t.Context(), ended} {
		for range 50 {
			m := NewMachine("")
			m.answer, m.asked = make(chan cards, 1), time.Now().Add(-time.Hour)
			m.answer <- cards{devices: []nvml.Device{{Name: "H200"}}}
			var l Look
			if m.wait(ctx, &l); len(l.Cards) != 1 || l.NoCards != "" {
				t.Fatalf("%+v", l)
			}
		}
	}
	m := NewMachine("")
	m.answer = make(chan cards)
	var l Look
	if m.wait(ended, &l); l.NoCards == "" {
		t.Errorf("%+v", l)
	}
}

// A part of a GPU has its processes; the GPU has those that are on no part.
func TestMachineWithParts(t *testing.T) {
	m, _ := machine(t, "driver version=580.65.06\n"+
		"gpu uuid=GPU-00010203-0405-0607-0809-0a0b0c0d0e0f name=H200 bus=0 total=1000 reserved=10 used=650 util=37 memutil=12\n"+
		"process pid=4194299 bytes=10 name=/x/part\nprocess pid=4194298 bytes=20 name=/x/whole\n"+
		"mig gi=3 ci=0 uuid=MIG-10010203-0405-0607-0809-0a0b0c0d0e0f name=\"H200 MIG 1g\" total=100 reserved=1 used=10\n"+
		"process pid=4194299 bytes=10 name=/x/part\n"+
		"fail call=nvmlDeviceGetMemoryInfo code=15 device=0\n")
	var s State
	s.Add(m.Look(t.Context(), Wanted{}))
	table := s.Table(all)
	if len(table.GPUs) < 2 || table.GPUs[1].Part != "0:3" || table.GPUs[1].Index != 0 {
		t.Fatalf("GPUs %+v", table.GPUs)
	}
	if r := row(table, 4194299); r == nil || len(r.Holdings) != 1 || r.Sum.Used != 10 || r.Holdings[0].GPU != 1 {
		t.Errorf("on the part: %+v", r)
	}
	if r := row(table, 4194298); r == nil || r.Holdings[0].GPU != 0 {
		t.Errorf("on the whole: %+v", r)
	}
	if p := s.Look().Problems; !slices.ContainsFunc(p, func(p string) bool { return strings.HasPrefix(p, "GPU 0: nvmlDeviceGetMemoryInfo") }) {
		t.Errorf("problems %q", p)
	}
}
