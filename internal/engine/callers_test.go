package engine_test

import (
	"cmp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// The settings of attribution are read as they are written, and what makes no sense is refused.
func TestSettingsOfAttribution(t *testing.T) {
	for text, want := range map[string]config.Options{
		"stacks:native":                        {Stacks: "native"},
		"stacks:all":                           {Stacks: "all"},
		"stacks:python,stack_sample:1MiB":      {Stacks: "python", StackSample: 1 << 20},
		"report:/var/tmp/out of:memory":        {Report: "/var/tmp/out of:memory"},
		"report:here,report_child:true":        {Report: "here", ReportChild: true},
		"history:100,stacks:native,top:off":    {History: 100, Stacks: "native", Top: config.SwitchOff},
		"stacks:off,report_child:false,top:on": {},
		"stack_sample:0":                       {},
	} {
		opts, err := config.Parse(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if opts.Stacks != cmp.Or(want.Stacks, config.StacksOff) || opts.StackSample != want.StackSample ||
			opts.Report != want.Report || opts.ReportChild != want.ReportChild || opts.Top != cmp.Or(want.Top, config.SwitchOn) {
			t.Errorf("%s: %+v, want %+v", text, opts, want)
		}
		if again, err := config.Parse(opts.String()); err != nil || again != opts {
			t.Errorf("%s is written %s, which is read %+v, %v", text, opts, again, err)
		}
	}
	for text, want := range map[string]int{"report:here": config.ReportHistory, "report:here,history:0": 0, "history:7,report:here": 7, "history:7": 7, "": 0} {
		if opts, err := config.Parse(text); err != nil || opts.History != want {
			t.Errorf("%s: a history of %d, %v, want %d", text, opts.History, err, want)
		} else if again, err := config.Parse(opts.String()); err != nil || again != opts {
			t.Errorf("%s is written %s, which is read %+v, %v", text, opts, again, err)
		}
	}
	if opts, _ := config.Parse("stacks:off,report_child:false,top:on,stack_sample:0"); opts.String() != "" || opts.Stacks != config.StacksOff {
		t.Errorf("defaults are written %s", opts)
	}
	for text, word := range map[string]string{"stacks:native+python": "choose off, python, native or all", "stacks:both": "native or all", "stacks:": "native or all", "stack_sample:1MiB": "stacks", "stacks:native,stack_sample:x": "stack_sample",
		"report:": "folder", "report_child:true": "report", "report_child:1": "true or false", "top:yes": "on or off"} {
		if _, err := config.Parse(text); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v, want an error with %q", text, err, word)
		}
	}
	if _, err := engine.New(sim.New(sim.Options{}), config.Options{Report: "a,b"}); err == nil {
		t.Error("a folder that the settings cannot name was accepted")
	}
}

// With stacks:native the engine finds out by itself where a Go program allocates, whichever function it calls.
func TestGoStacks(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{Stacks: config.StacksNative}, 1)
	st, pool := e.streams[0], e.pool(t, 1, config.PoolOptions{})
	var line int
	here := func(p cuda.Ptr, err error) cuda.Ptr { // called on the line that allocates
		must(t, err)
		_, _, line, _ = runtime.Caller(1)
		return p
	}
	var blocks []cuda.Ptr
	check := func(p cuda.Ptr) {
		t.Helper()
		blocks = append(blocks, p)
		b, err := e.a.Base(p)
		must(t, err)
		f := e.a.Stacks.GoFrames(b.Stack)
		if len(f) < 2 || !strings.HasSuffix(f[0].Function, ".TestGoStacks") || f[0].Line != line || !strings.HasSuffix(f[1].Function, "testing.tRunner") {
			t.Errorf("allocated on line %d: stack %d is %+v", line, b.Stack, f)
		}
	}
	check(here(e.dev.Alloc(5000, st)))
	check(here(pool.Alloc(5000, st)))
	check(here(e.dev.AllocWith(5000, st, engine.AllocOptions{Tag: 7})))
	check(here(pool.Device().AllocWith(5000, st, engine.AllocOptions{Pool: pool, Tag: 7})))
	check(here(e.dev.AllocWith(5000, st, engine.AllocOptions{Library: 3})))
	e.free(t, blocks[0])
	blocks = blocks[1:]
	check(here(e.dev.AllocWith(5000, st, engine.AllocOptions{Cached: true})))
	check(here(e.dev.AllocWith(5000, st, engine.AllocOptions{HostOrder: true})))
	check(here(pool.Resource().Alloc(5000, 512, st.Handle())))
	check(here(pool.Resource().Alloc(5000, 4096, st.Handle())))
	mine := e.a.Stacks.Of([]uint64{1, 2, 3})
	p, err := e.dev.AllocWith(5000, st, engine.AllocOptions{Stack: mine})
	must(t, err)
	if b, err := e.a.Base(p); err != nil || b.Stack != mine {
		t.Errorf("%+v, %v; want the stack that was named", b, err)
	}
	blocks = append(blocks, p)
	before := e.a.Stacks.Table().Stacks
	var loop []cuda.Ptr
	for range 100 {
		loop = append(loop, e.alloc(t, 5000, st))
	}
	if n := e.a.Stacks.Table().Stacks; n != before+1 {
		t.Errorf("a loop has %d stacks", n-before)
	}
	if u := e.dev.Views.StackUsage(); len(u) != len(blocks)+1 || u[0].Blocks != 100 {
		t.Errorf("%+v", u)
	}
	for _, p := range slices.Concat(blocks, loop) {
		e.free(t, p)
	}
	// Who knows better says so.
	e.a.Stacks.Catch(nil)
	p = e.alloc(t, 5000, st)
	if b, _ := e.a.Base(p); b.Stack != 0 {
		t.Errorf("%+v, though nobody is to find out", b)
	}
	e.a.Stacks.Catch(func(size uint64) uint32 { return e.a.Stacks.Of([]uint64{size}) })
	q := e.alloc(t, 777, st)
	if b, _ := e.a.Base(q); !slices.Equal(e.a.Stacks.Frames(b.Stack), []uint64{777}) {
		t.Errorf("%+v: %v", b, e.a.Stacks.Frames(b.Stack))
	}
}

// Of requests below stack_sample a part is caught that follows their size; larger ones are caught always.
func TestStackSample(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{Stacks: config.StacksNative, StackSample: 64 << 10}, 1)
	const n = 4000
	for _, c := range []struct {
		size   uint64
		lo, hi int
	}{{64 << 10, n, n}, {1 << 20, n, n}, {16 << 10, n / 5, n * 3 / 10}, {512, 5, 80}} { // a quarter; 1/128, 31 of them
		caught := 0
		for range n {
			p := e.alloc(t, c.size, e.streams[0])
			if b, _ := e.a.Base(p); b.Stack != 0 {
				caught++
			}
			e.free(t, p)
		}
		if caught < c.lo || caught > c.hi {
			t.Errorf("%d of %d requests of %d bytes were caught, want %d to %d", caught, n, c.size, c.lo, c.hi)
		}
	}
}

// A stack that is known costs no Go memory.
func TestSteadyStateOfGoStacks(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{Stacks: config.StacksNative}, 1)
	round := func() { e.free(t, e.alloc(t, 5000, e.streams[0])) }
	round()
	e.drv.ResetCalls()
	if n := testing.AllocsPerRun(1000, round); n != 0 || e.drv.Calls().Count != 0 {
		t.Errorf("%v Go allocations, %d driver calls", n, e.drv.Calls().Count)
	}
}
