package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// TestTranscripts runs the files in testdata/transcripts: lines of commands, and what came of them. Addresses are
// written as the number of the segment's reservation, in the order of first appearance, and the offset in it.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		s := &transcript{t: t}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
	})
}

type transcript struct {
	t       *testing.T
	drv     *sim.Driver
	a       *engine.Allocator
	dev     *engine.Device
	streams map[string]*engine.Stream
	pools   map[string]*engine.Pool
	blocks  map[string]cuda.Ptr
	names   map[uint64]string // of what was handed out last at each address
	areas   []uint64
	out     strings.Builder
}

// run carries out a command, one line of its input after the other.
func (s *transcript) run(t *testing.T, d *datadriven.TestData) string {
	s.out.Reset()
	if d.Cmd == "new" {
		s.start(d)
		return ""
	}
	for _, line := range strings.Split(strings.TrimSpace(d.Input), "\n") {
		if f := strings.Fields(line); len(f) > 0 {
			s.line(f)
		}
	}
	if err := s.drv.Fault(); err != nil {
		t.Fatal(err)
	}
	return s.out.String()
}

// start makes a machine: new capacity=1GiB lag=20ms conf=(chunk:2MiB).
func (s *transcript) start(d *datadriven.TestData) {
	o := sim.Options{Capacity: gib, Check: sim.CheckOrder}
	conf := ""
	for _, arg := range d.CmdArgs {
		switch arg.Key {
		case "capacity":
			o.Capacity = s.bytes(arg.Vals[0])
		case "lag":
			lag, err := time.ParseDuration(arg.Vals[0])
			must(s.t, err)
			o.Lag = lag
		case "conf":
			conf = strings.Join(arg.Vals, ",")
		default:
			d.Fatalf(s.t, "unknown argument %s", arg.Key)
		}
	}
	opts, err := config.Parse(conf)
	must(s.t, err)
	s.drv = sim.New(o)
	s.a, err = engine.New(s.drv, opts)
	must(s.t, err)
	s.dev, err = s.a.Device(0)
	must(s.t, err)
	s.streams, s.pools, s.blocks, s.areas = map[string]*engine.Stream{}, map[string]*engine.Pool{}, map[string]cuda.Ptr{}, nil
	s.names = map[uint64]string{}
}

func (s *transcript) bytes(text string) uint64 {
	n, err := units.ParseBytes(text)
	must(s.t, err)
	return n
}

// stream is the stream of that name: "null", else one that does not block, durable unless its name ends in "?".
func (s *transcript) stream(name string) *engine.Stream {
	if st := s.streams[name]; st != nil {
		return st
	}
	h, opts := cuda.StreamNull, []config.StreamOption{}
	if name != "null" {
		h = s.drv.NewStreamNonBlocking(0)
		if !strings.HasSuffix(name, "?") {
			opts = append(opts, config.StreamDurable)
		}
	}
	st, err := s.dev.Stream(h, opts...)
	must(s.t, err)
	s.streams[name] = st
	return st
}

func (s *transcript) say(format string, args ...any) { fmt.Fprintf(&s.out, format+"\n", args...) }

func (s *transcript) result(err error) {
	if err != nil {
		s.say("%v", err)
	}
}

// place writes an address as reservation and offset.
func (s *transcript) place(p uint64) string {
	base := p &^ (1<<32 - 1)
	i := slices.Index(s.areas, base)
	if i < 0 {
		i = len(s.areas)
		s.areas = append(s.areas, base)
	}
	return fmt.Sprintf("%d:%s", i, kibs(p-base))
}

func kibs(n uint64) string {
	if n%mib == 0 {
		return strconv.FormatUint(n/mib, 10) + "M"
	}
	if n%kib == 0 {
		return strconv.FormatUint(n/kib, 10) + "K"
	}
	return strconv.FormatUint(n, 10)
}

func (s *transcript) line(f []string) {
	switch cmd, f := f[0], f[1:]; cmd {
	case "alloc": // NAME SIZE STREAM [POOL]
		st := s.stream(f[2])
		pool := s.dev.DefaultPool()
		if len(f) > 3 {
			pool = s.pools[f[3]]
		}
		size := s.bytes(f[1])
		p, err := pool.Alloc(size, st)
		var oom *memory.OutOfMemoryError
		switch {
		case errors.As(err, &oom):
			s.say("%s: %v", f[0], err)
		case err != nil:
			s.say("%s: %v", f[0], err)
		case p == 0:
			s.say("%s = null", f[0])
		default:
			s.blocks[f[0]] = p
			s.names[uint64(p)] = f[0]
			s.say("%s at %s", f[0], s.place(uint64(p)))
			must(s.t, s.drv.Use(0, st.Handle(), p, size))
		}
	case "free":
		for _, name := range f {
			s.result(s.a.Free(s.blocks[name]))
		}
	case "record": // NAME STREAM: the stream uses the block, in order after what its own has queued
		st := s.stream(f[1])
		b, err := s.a.Base(s.blocks[f[0]])
		must(s.t, err)
		e, err := s.drv.EventCreate(0)
		must(s.t, err)
		for _, o := range s.streams {
			if o.ID() == b.Stream {
				must(s.t, s.drv.EventRecord(0, e, o.Handle()))
			}
		}
		must(s.t, s.drv.StreamWaitEvent(0, st.Handle(), e))
		must(s.t, s.drv.EventDestroy(0, e))
		must(s.t, s.drv.Use(0, st.Handle(), b.Base, b.Size))
		s.result(s.a.RecordStream(b.Base, st))
	case "advance":
		d, err := time.ParseDuration(f[0])
		must(s.t, err)
		s.drv.Advance(d)
	case "limit":
		s.dev.SetLimit(s.bytes(f[0]))
	case "pool": // NAME [malloc|single|custom] [whole]
		var o config.PoolOptions
		for _, word := range f[1:] {
			switch word {
			case "malloc":
				o.Kind = config.PoolMalloc
			case "single":
				o.Kind = config.PoolSingleHandle
			case "custom":
				o.Upstream = &upstream{Resource: resource.Device(s.drv, 0), observe: func(what string, size uint64) {
					s.say("upstream of %s: %s %s", f[0], what, kibs(size))
				}}
			case "whole":
				o.SegmentPerBlock = true
			}
		}
		p, err := s.dev.NewPool(memory.PoolID{0, uint64(len(s.pools) + 1)}, o)
		s.result(err)
		s.pools[f[0]] = p
	case "release":
		s.result(s.pools[f[0]].Release())
	case "trim":
		s.result(s.a.Trim())
	case "destroy":
		must(s.t, s.drv.DestroyStream(0, s.streams[f[0]].Handle()))
	case "map":
		s.blockMap()
	case "stats":
		s.stats()
	case "calls": // since the last time
		s.calls()
	default:
		s.t.Fatalf("unknown command %q", cmd)
	}
}

// blockMap draws the snapshot: a line for each run of mapped chunks, with its chunks and its blocks.
func (s *transcript) blockMap() {
	for _, seg := range s.dev.Views.Snapshot() {
		if seg.Addr == 0 {
			s.say("spare %s", kibs(seg.Size))
			continue
		}
		class := "small"
		if seg.Large {
			class = "large"
		}
		var chunks, blocks []string
		for _, c := range seg.Chunks {
			chunks = append(chunks, kibs(c.Size))
		}
		for _, b := range seg.Blocks {
			switch b.State {
			case memory.BlockUsed:
				blocks = append(blocks, fmt.Sprintf("%s %s", s.names[b.Addr], kibs(b.Size)))
			case memory.BlockPending:
				blocks = append(blocks, "waiting "+kibs(b.Size))
			default:
				blocks = append(blocks, "- "+kibs(b.Size))
			}
		}
		what := "segment"
		if len(chunks) > 0 {
			what = "chunks " + strings.Join(chunks, "+")
		}
		s.say("%s %s, pool %d, stream %d, %s: [%s]", s.place(seg.Addr), class, seg.Pool[1], seg.Stream, what, strings.Join(blocks, " | "))
	}
}

func (s *transcript) stats() {
	st := s.dev.Views.Stats()
	s.say("reserved %s = active %s + inactive %s; allocated %s in %d blocks; spare %s; %d old mappings",
		kibs(uint64(st.Reserved.All.Current)), kibs(uint64(st.ActiveBytes.All.Current)), kibs(uint64(st.InactiveBytes.All.Current)),
		kibs(uint64(st.Allocated.All.Current)), st.Allocations.All.Current, kibs(st.SpareBytes), st.StaleMappings)
	s.say("moved %d, retries %d, failures %d; slow path: fit %d collect %d remap %d grow %d lend %d callback %d", st.Remaps,
		st.Retries, st.OOMs, st.ByFit, st.ByCollect, st.ByRemap, st.ByGrow, st.ByLend, st.ByCallback)
}

func (s *transcript) calls() {
	calls := s.drv.Calls()
	var lines []string
	for name, c := range calls.Calls {
		lines = append(lines, fmt.Sprintf("%s %d", name, c.Count))
	}
	slices.Sort(lines)
	s.say("%s", strings.Join(lines, ", "))
	s.drv.ResetCalls()
}
