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
	cmd := x.command("trace", "--stacks", "native", "--", program, "an argument")
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
		d.DriverCalls != 3 || d.Name != "Stand-in GPU 0" || d.Total != 64<<30 || d.UUID[0] != 0x20 || d.UUID[15] != 0 {
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
	p := &liveProcess{pid: os.Getpid(), start: about.Start, run: analyze.NewDriverRun(), calls: map[int]uint64{}, of: &tracedProcess{}}
	if p.page, err = live.Publish(about, p.show, p.holders); err != nil {
		t.Fatal(err)
	}
	defer p.page.Close()
	takes := func() { time.Sleep(50 * time.Millisecond) }
	l := &traceLive{processes: map[uint32]*liveProcess{0: p}, gpu: (&recorder{}).gpu, frames: func(uint32) []recording.Frame { takes(); return nil }}
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
