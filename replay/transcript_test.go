package replay

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cockroachdb/datadriven"
)

// TestTranscripts plays the files in testdata: each begins with a policy and goes on with requests, and shows what the
// policy got from the driver and where it put things. Segments are named A, B, … in the order in which they were got.
//
//	policy NAME[:CONF] [capacity=SIZE]
//	alloc NAME SIZE [stream=N] [pool=N]
//	request NAME       the owner gives the block back; another stream still uses it
//	free NAME...
//	empty-cache
//	release pool=N
//	show               segments and their blocks: [used] (free) {unmapped}
//	stats
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		s := &transcript{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
	})
}

type transcript struct {
	policy Policy
	names  map[string]int
	next   int
	segs   []recording.Segment // every segment that was got, in order
	out    strings.Builder
}

func (s *transcript) run(t *testing.T, d *datadriven.TestData) string {
	s.out.Reset()
	if d.Cmd == "policy" {
		s.begin(t, d)
		return s.out.String()
	}
	for _, line := range append([]string{d.Cmd + " " + argsText(d)}, strings.Split(d.Input, "\n")...) {
		if f := strings.Fields(line); len(f) > 0 {
			if err := s.do(f[0], f[1:]); err != nil {
				d.Fatalf(t, "%s: %v", line, err)
			}
		}
	}
	return s.out.String()
}

func argsText(d *datadriven.TestData) string {
	var parts []string
	for _, a := range d.CmdArgs {
		parts = append(parts, a.String())
	}
	return strings.Join(parts, " ")
}

func (s *transcript) begin(t *testing.T, d *datadriven.TestData) {
	capacity := uint64(0)
	spec, err := ParseSpec(strings.TrimSpace(d.Input))
	if err != nil {
		d.Fatalf(t, "%v", err)
	}
	for _, a := range d.CmdArgs {
		if a.Key == "capacity" {
			if capacity, err = units.ParseBytes(a.Vals[0]); err != nil {
				d.Fatalf(t, "%v", err)
			}
		}
	}
	p := NewPlan(&recording.Trace{Streams: []uint64{0, 0x100, 0x200}, Pools: []recording.PoolID{{}, {0, 1}, {0, 2}}})
	p.Blocks = 1000
	env := &Env{Plan: p, Spec: spec, Capacity: capacity, Emit: s.emit, Note: func(string) {}}
	policy, conf, err := factories[spec.Name](env)
	if err != nil {
		fmt.Fprintln(&s.out, err)
		return
	}
	*s = transcript{policy: policy, names: map[string]int{}}
	fmt.Fprintln(&s.out, conf)
}

func (s *transcript) emit(e event.Event) {
	if e.Kind == event.SegmentAlloc || e.Kind == event.SegmentMap && s.place(e.Addr) == "?" {
		s.segs = append(s.segs, recording.Segment{Addr: e.Addr, Size: e.Size, Stream: e.Stream})
		if e.Kind == event.SegmentMap {
			s.segs[len(s.segs)-1].Size = 160000 * mib // an expandable segment is one range
		}
	}
	fmt.Fprintf(&s.out, "  %s %s %s", e.Kind, s.place(e.Addr), sizeText(e.Size))
	if e.Handle != 0 {
		fmt.Fprintf(&s.out, " handle %d", e.Handle)
	}
	fmt.Fprintln(&s.out)
}

// place is an address as segment and offset.
func (s *transcript) place(addr uint64) string {
	for i := len(s.segs) - 1; i >= 0; i-- {
		if g := s.segs[i]; addr >= g.Addr && addr < g.Addr+g.Size {
			return fmt.Sprintf("%c+%s", 'A'+i, sizeText(addr-g.Addr))
		}
	}
	return "?"
}

// bytes is a size in the largest unit that it is a whole number of.
func sizeText(n uint64) string {
	switch {
	case n == 0:
		return "0"
	case n%mib == 0:
		return fmt.Sprintf("%dMiB", n/mib)
	case n%1024 == 0:
		return fmt.Sprintf("%dKiB", n/1024)
	}
	return fmt.Sprint(n)
}

func (s *transcript) do(cmd string, args []string) error {
	var stream, pool uint32
	var rest []string
	for _, a := range args {
		if _, err := fmt.Sscanf(a, "stream=%d", &stream); err == nil {
			continue
		}
		if _, err := fmt.Sscanf(a, "pool=%d", &pool); err == nil {
			continue
		}
		rest = append(rest, a)
	}
	switch cmd {
	case "alloc":
		size, err := units.ParseBytes(rest[1])
		if err != nil {
			return err
		}
		b := s.next
		s.next++
		addr, err := s.policy.Alloc(b, size, stream, pool)
		if errors.Is(err, cuda.ErrOutOfMemory) {
			fmt.Fprintf(&s.out, "%s: out of memory\n", rest[0])
			return nil
		}
		if err != nil {
			return err
		}
		s.names[rest[0]] = b
		fmt.Fprintf(&s.out, "%s: %s\n", rest[0], s.place(addr))
	case "request":
		for _, n := range rest {
			s.policy.FreeRequested(s.names[n])
		}
	case "free":
		for _, n := range rest {
			if err := s.policy.Free(s.names[n]); err != nil {
				return err
			}
		}
	case "empty-cache":
		return s.policy.(Releaser).EmptyCache()
	case "release":
		return s.policy.(Releaser).ReleasePool(pool)
	case "show":
		s.show()
	case "stats":
		st := s.policy.Stats()
		allocated, reserved := s.policy.Usage()
		fmt.Fprintf(&s.out, "allocated %s reserved %s peak %s syncs %d+%d retries %d ooms %d\n", sizeText(allocated), sizeText(reserved),
			sizeText(st.PeakReserved), st.StreamSyncs, st.DeviceSyncs, st.Retries, st.OOMs)
		for c := range numCalls {
			if n := st.Calls[callNames[c]]; n > 0 {
				fmt.Fprintf(&s.out, "  %s %d\n", callNames[c], n)
			}
		}
	default:
		return errors.New("unknown command")
	}
	return nil
}

func (s *transcript) show() {
	t, ok := s.policy.(*torch)
	if !ok {
		fmt.Fprintln(&s.out, "no segments shown")
		return
	}
	for _, g := range t.Segments() {
		kind := "small"
		if g.Large {
			kind = "large"
		}
		fmt.Fprintf(&s.out, "%s %s stream %d pool %d:", s.place(g.Addr), kind, g.Stream, g.Pool)
		for _, b := range g.Blocks {
			if b.State == recording.Active {
				fmt.Fprintf(&s.out, " [%s]", sizeText(b.Size))
			} else {
				fmt.Fprintf(&s.out, " (%s)", sizeText(b.Size))
			}
		}
		fmt.Fprintln(&s.out)
	}
}
