//go:build linux && amd64

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	allocator "github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/internal/cputime"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/nvml"
	nvmlstandin "github.com/cistern-gpu/cistern/internal/nvml/standin"
	"github.com/cistern-gpu/cistern/recording"
)

// held is a traced program that holds memory and says so.
const heldProgram = `
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>
#include <sys/wait.h>
typedef uint64_t dptr;
int cuInit(unsigned); int cuDevicePrimaryCtxRetain(void **, int); int cuCtxPushCurrent_v2(void *);
int cuMemAlloc_v2(dptr *, size_t); int cuMemFree_v2(dptr);
__attribute__((noinline)) int weights(dptr *p) { int r = cuMemAlloc_v2(p, 64 << 20); __asm__ volatile(""); return r; }
__attribute__((noinline)) int activations(dptr *p) { int r = cuMemAlloc_v2(p, 5000000); __asm__ volatile(""); return r; }
static void step(void) { char line[8]; printf("ready %d\n", (int)getpid()); fflush(stdout); if (!fgets(line, sizeof line, stdin)) _exit(0); }
int main(void) {
	void *context; dptr a, b, c;
	step();
	cuInit(0); cuDevicePrimaryCtxRetain(&context, 0); cuCtxPushCurrent_v2(context);
	if (weights(&a) || activations(&b) || activations(&c)) return 1;
	step();
	cuMemFree_v2(b);
	cuMemFree_v2(c);
	step();
	return 0;
}`

// TestTraceShown: what a traced program holds is seen from outside while it runs, by kind of call and by stack, and no longer
// than that.
func TestTraceShown(t *testing.T) {
	x := newTraced(t)
	source := filepath.Join(x.dir, "held.c")
	if err := os.WriteFile(source, []byte(heldProgram), 0o600); err != nil {
		t.Fatal(err)
	}
	program := x.compile("held", source, "-rdynamic", x.standin, "-Wl,-rpath,"+filepath.Dir(x.standin))
	library := nvmlstandin.Build(t)
	machine := nvmlstandin.Describe(t, "driver version=580.65.06",
		`gpu uuid=GPU-00010203-0405-0607-0809-0a0b0c0d0e0f name="NVIDIA H200" bus=0 total=150000 used=4000`)
	cmd := x.command("trace", "--stacks", "native", "--", program, "an argument")
	cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+filepath.Dir(library), "STANDIN_NVML="+machine)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	lines := bufio.NewScanner(out)
	pid := 0
	ready := func() {
		t.Helper()
		if !lines.Scan() {
			t.Fatal("the program has ended")
		}
		pid, _ = strconv.Atoi(strings.TrimPrefix(lines.Text(), "ready "))
	}
	ready()
	if r := pageOf(t, pid); r != nil {
		t.Error("there is a page before the driver was called")
	}
	io.WriteString(in, "\n")
	ready()
	var r *live.Reader
	for end := time.Now().Add(longest); r == nil && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		r = pageOf(t, pid)
	}
	if r == nil {
		t.Fatal("there is no page")
	}
	if !tracedHere(pid) || tracedHere(os.Getpid()) || tracedHere(1) || tracedHere(1<<30) {
		t.Error("it is not known who is traced")
	}
	const held = 64<<20 + 2*5000000
	p := pageUntil(t, r, "allocations are shown, and on which card", func(p live.Process) bool {
		if len(p.Devices) != 1 || p.Devices[0].Details == nil { // which are written less often, and may be of when less was held
			return false
		}
		d := p.Devices[0]
		return len(d.Details.Kinds) == 1 && d.Details.Kinds[0].Blocks == 3 && d.Allocated == held && d.Name != ""
	})
	d := p.Devices[0]
	if p.PID != pid || p.Kind != live.KindTraced || p.Version != allocator.Version || !slices.Equal(p.Args, []string{program, "an argument"}) {
		t.Errorf("%+v", p)
	}
	if d.Ordinal != 0 || d.Reserved < held || d.Reserved%(2<<20) != 0 || d.Cached != d.Reserved-held || d.PeakAllocated != held || d.PeakReserved != d.Reserved ||
		d.DriverCalls != 3 || d.Name != "NVIDIA H200" || d.Total != 150000 || d.UUID[15] != 15 {
		t.Errorf("%+v", d)
	}
	if k := d.Details.Kinds; k[0] != (live.Use{Name: "cuMemAlloc", Blocks: 3, Bytes: held}) {
		t.Errorf("by kind %+v", k)
	}
	if s := d.Details.Stacks; len(s) < 2 || !strings.Contains(s[0].Name, "weights") || s[0].Bytes != 64<<20 || !strings.Contains(s[1].Name, "activations") {
		t.Errorf("by stack %+v", s)
	}
	io.WriteString(in, "\n")
	ready()
	p = pageUntil(t, r, "the frees are seen", func(p live.Process) bool { return p.Devices[0].Allocated == 64<<20 })
	if d := p.Devices[0]; d.PeakAllocated != held || d.DriverCalls != 5 {
		t.Errorf("%+v", d)
	}
	io.WriteString(in, "\n")
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := r.Read(false); err == nil || pageOf(t, pid) != nil {
		t.Errorf("after its end: %v", err)
	}
}

func pageOf(t *testing.T, pid int) (found *live.Reader) {
	t.Helper()
	all, errs := live.List(t.Context())
	for _, err := range errs {
		if strings.HasPrefix(err.Error(), fmt.Sprintf("process %d: ", pid)) || !strings.HasPrefix(err.Error(), "process ") { // not another's
			t.Fatal(err)
		}
	}
	for _, r := range all {
		if p, err := r.Read(false); err == nil && p.PID == pid && found == nil {
			found = r
			t.Cleanup(r.Close)
		} else {
			r.Close()
		}
	}
	return found
}

func pageUntil(t *testing.T, r *live.Reader, what string, so func(p live.Process) bool) live.Process {
	t.Helper()
	for end := time.Now().Add(longest); ; time.Sleep(20 * time.Millisecond) {
		p, err := r.Read(true)
		if err != nil {
			t.Fatal(err)
		}
		if so(p) {
			return p
		}
		if time.Now().After(end) {
			t.Fatalf("it did not come to be that %s: %+v", what, p)
		}
	}
}

// TestTraceShownWhileStopped: what a process holds stays current, and allocations are counted as often as takes little CPU
// time, however long the tracer is stopped meanwhile.
func TestTraceShownWhileStopped(t *testing.T) {
	about, err := live.Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	p := &liveProcess{pid: os.Getpid(), start: about.Start, run: analyze.NewDriverRun(), calls: map[int]uint64{}, cards: map[int]nvml.Device{}}
	if p.page, err = live.Publish(about, p.show, p.holders); err != nil {
		t.Fatal(err)
	}
	defer p.page.Close()
	takes := func() { time.Sleep(50 * time.Millisecond) }
	l := &traceLive{processes: map[uint32]*liveProcess{0: p}, cards: &liveCards{failed: true}, frames: func(uint32) []recording.Frame { takes(); return nil }}
	p.run.Call(&recording.Call{Kind: recording.MemAlloc, Addr: 1 << 30, Size: 5, Stack: 1})
	look := func(at time.Time) (counted bool) {
		p.mu.Lock()
		p.devices, p.details = nil, nil
		p.mu.Unlock()
		p.asked.Store(true)
		l.refresh(at, 0)
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.devices) != 1 || p.devices[0].Allocated != 5 {
			t.Errorf("what is shown is %+v", p.devices)
		}
		return p.details != nil
	}
	now := time.Now()
	if !look(now) || l.next.Sub(now) > liveEvery || l.nextCount.Sub(now) > 900*time.Millisecond {
		t.Errorf("after a stop of 50 ms it is looked at after %v, and counted after %v", l.next.Sub(now), l.nextCount.Sub(now))
	}
	takes = func() {
		for begin := cputime.Thread(); cputime.Thread()-begin < 20*time.Millisecond; {
		}
	}
	now = now.Add(time.Hour)
	if !look(now) || look(now.Add(2*liveEvery)) || !look(now.Add(time.Hour)) {
		t.Error("counting that takes 20 ms is to be done at most every 0.4 s, and then again")
	}
}

// TestCardsOfSlowNVML: NVML is waited for however long it takes to begin, and asked once; that there is none is final.
func TestCardsOfSlowNVML(t *testing.T) {
	type question struct {
		bounded bool
		answer  chan error
	}
	asked := make(chan question)
	c := &liveCards{open: func(ctx context.Context, _ string) (*nvml.Library, error) {
		_, bounded := ctx.Deadline()
		q := question{bounded, make(chan error)}
		asked <- q
		return nil, <-q.answer
	}}
	c.all()
	q := <-asked
	if q.bounded {
		t.Error("it is waited for until a time only")
	}
	for range 3 {
		c.all() // which waits for nothing, and would ask anew
	}
	q.answer <- errors.New("there is none")
	for over := false; !over; time.Sleep(time.Millisecond) {
		c.all()
		c.mu.Lock()
		over = c.failed
		c.mu.Unlock()
	}
	c.mu.Lock()
	c.asked = time.Time{}
	c.mu.Unlock()
	c.all()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asking {
		t.Error("it is asked again")
	}
}

// TestCards: which card a process means by a number is known or not, and not guessed.
func TestCards(t *testing.T) {
	const pid = 42
	card := func(index int, pids ...int) nvml.Device {
		d := nvml.Device{Index: index, UUID: [16]byte{byte(0xa0 + index)}}
		for _, p := range pids {
			d.Processes = append(d.Processes, nvml.Process{PID: p})
		}
		return d
	}
	part := nvml.Device{Index: 0, MIG: true, UUID: [16]byte{0xff}}
	for _, c := range []struct {
		name    string
		cards   []nvml.Device
		visible string
		order   string
		ordinal int
		used    int
		want    byte // first of the UUID, 0: not known
	}{
		{"the only one", []nvml.Device{card(0)}, "", "", 0, 1, 0xa0},
		{"the only part of one", []nvml.Device{card(0), part}, "", "", 0, 1, 0xff},
		{"not the second of one", []nvml.Device{card(0)}, "", "", 1, 2, 0},
		{"any of two", []nvml.Device{card(0), card(1)}, "", "", 0, 1, 0},
		{"seen on one", []nvml.Device{card(0), card(1, 7, pid)}, "", "", 0, 1, 0xa1},
		{"seen on one, using two", []nvml.Device{card(0), card(1, pid)}, "", "", 0, 2, 0},
		{"by UUID", []nvml.Device{card(0), card(1)}, "GPU-a1000000-0000-0000-0000-000000000000,GPU-a0", "", 1, 2, 0xa0},
		{"by UUID, seen elsewhere", []nvml.Device{card(0), card(1, pid), card(2, pid)}, "GPU-a0", "", 0, 2, 0},
		{"by UUID of two alike", []nvml.Device{card(0), card(1)}, "GPU-a", "", 0, 2, 0},
		{"by bus", []nvml.Device{card(0), card(1), card(2)}, "2, 1", "PCI_BUS_ID", 1, 2, 0xa1},
		{"by bus, all visible", []nvml.Device{card(0), card(1), card(2)}, "", "PCI_BUS_ID", 1, 2, 0xa1},
		{"by another order", []nvml.Device{card(0), card(1), card(2)}, "2,1", "FASTEST_FIRST", 1, 2, 0},
		{"beyond the visible", []nvml.Device{card(0), card(1)}, "1", "PCI_BUS_ID", 1, 2, 0},
		{"no NVML", nil, "GPU-a0", "", 0, 1, 0},
	} {
		var visible []string
		if c.visible != "" {
			visible = strings.Split(c.visible, ",")
		}
		d, ok := cardOf(c.cards, pid, visible, c.order, c.ordinal, c.used)
		if d.UUID[0] != c.want || ok != (c.want != 0) {
			t.Errorf("%s: %x, %v; want %x", c.name, d.UUID[0], ok, c.want)
		}
	}
}
