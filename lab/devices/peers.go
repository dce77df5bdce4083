package devices

import (
	"errors"
	"fmt"
	"io"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/resource"
	upstreams "github.com/cistern-gpu/cistern/resource/open"
)

const mib = 1 << 20

// kinds are the pools whose memory is opened to the other device: one with the engine's own memory, one for each
// upstream that has memory of its own, and one that has most of it from its spill.
var kinds = []string{"", "device", "virtual", "async", "managed", "pinned", "host_numa", spilling}

const spilling = "device, and async beyond 2 MiB"

// sizes of the blocks in each pool: one that shares a chunk with others, one that does not, and one of odd length.
func (m *machine) sizes() []uint64 { return []uint64{1000, m.large, m.large/8 + 4093} }

// block is memory that holds the pattern of its seed.
type block struct {
	p          cuda.Ptr
	size, seed uint64
	what       string
}

// side is one device of an allocator.
type side struct {
	dev    cistern.Device
	stream cistern.Stream
	pools  map[string]cistern.Pool
	ups    []resource.Resource // under the pools
}

// newSide makes pools of a device, which have this first number. Upstreams that it cannot have are left out, and named.
func newSide(m *machine, out io.Writer, a *cistern.Allocator, id cuda.Device, number uint64) (*side, error) {
	s := &side{pools: map[string]cistern.Pool{}}
	var err error
	if s.dev, err = a.Device(id); err != nil {
		return nil, err
	}
	handle, err := m.StreamCreate(id, false)
	if err != nil {
		return nil, err
	}
	if s.stream, err = s.dev.Stream(handle); err != nil {
		return nil, err
	}
	for i, kind := range kinds {
		if kind == "" {
			s.pools[kind] = s.dev.DefaultPool()
			continue
		}
		var o cistern.PoolOptions
		if kind == spilling {
			o.Limit = 2 * mib
			if o.Upstream, err = s.upstream(m, "device"); err == nil {
				o.Spill, err = s.upstream(m, "async")
			}
		} else {
			o.Upstream, err = s.upstream(m, kind)
		}
		if err != nil {
			fmt.Fprintf(out, "note: device %d has no %s: %v\n", id, kind, err)
			continue
		}
		if s.pools[kind], err = s.dev.NewPoolWith(cistern.PoolID{number, uint64(i)}, o); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *side) upstream(m *machine, words string) (resource.Resource, error) {
	up, err := upstreams.Parse(m.driver, s.dev.ID(), words)
	if err == nil {
		s.ups = append(s.ups, up)
	}
	return up, err
}

// blocks gets memory of every kind and fills it on the side's own stream.
func (s *side) blocks(m *machine, seed *uint64) ([]block, error) {
	var all []block
	for _, kind := range kinds {
		pool := s.pools[kind]
		for _, size := range m.sizes() {
			if pool == (cistern.Pool{}) {
				continue
			}
			p, err := pool.Alloc(size, s.stream)
			if err != nil {
				return nil, fmt.Errorf("%d bytes of pool %q of device %d: %w", size, kind, s.dev.ID(), err)
			}
			*seed++
			b := block{p, size, *seed, fmt.Sprintf("%d bytes of pool %q of device %d", size, kind, s.dev.ID())}
			all = append(all, b)
			if err := m.Fill(s.dev.ID(), s.stream.Handle(), p, size, b.seed); err != nil {
				return nil, fmt.Errorf("%s: %w", b.what, err)
			}
		}
	}
	return all, m.StreamSynchronize(s.dev.ID(), s.stream.Handle())
}

// crossed has the other side read what the owner wrote and write it anew, and the owner read that.
func crossed(m *machine, owner, peer *side, all []block, seed *uint64) error {
	for i := range all {
		b := &all[i]
		id, st := peer.dev.ID(), peer.stream.Handle()
		*seed++
		err := m.Check(id, st, b.p, b.size, b.seed)
		if err == nil {
			err = m.Fill(id, st, b.p, b.size, *seed)
		}
		if err == nil {
			err = m.StreamSynchronize(id, st)
		}
		if err == nil {
			err = m.Check(owner.dev.ID(), owner.stream.Handle(), b.p, b.size, *seed)
		}
		if err == nil {
			err = m.Wrong()
		}
		if err != nil {
			return fmt.Errorf("%s, written on device %d: %w", b.what, id, err)
		}
		b.seed = *seed
	}
	return nil
}

// peers opens each device's memory to the other, for each way in which the engine holds memory.
func peers(m *machine, out io.Writer) error {
	for _, opts := range []cistern.Options{{Backend: cistern.BackendVMM}, {Backend: cistern.BackendMalloc}, {SingleHandle: true}} {
		for owner := range cuda.Device(2) {
			if err := peersWith(m, out, opts, owner); err != nil {
				return fmt.Errorf("settings %q: %w", opts.String(), err)
			}
		}
	}
	return nil
}

func peersWith(m *machine, out io.Writer, opts cistern.Options, id cuda.Device) error {
	a, err := cistern.New(m.driver, opts)
	if err != nil {
		return err
	}
	owner, err := newSide(m, out, a, id, 1)
	if err != nil {
		return err
	}
	peer, err := newSide(m, out, a, other(id), 1)
	if err != nil {
		return err
	}
	var seed uint64
	before, err := owner.blocks(m, &seed) // mapped before there is access
	if err != nil {
		return err
	}
	spare, err := owner.blocks(m, &seed) // and so is what is cached then
	if err != nil {
		return err
	}
	for _, b := range spare {
		if err := a.Free(b.p); err != nil {
			return err
		}
	}
	if err := owner.dev.EnablePeer(peer.dev.ID()); err != nil {
		return err
	}
	after, err := owner.blocks(m, &seed)
	if err != nil {
		return err
	}
	late, err := newSide(m, out, a, id, 2) // a stream and pools that come after
	if err != nil {
		return err
	}
	fresh, err := late.blocks(m, &seed)
	if err != nil {
		return err
	}
	for _, all := range [][]block{before, after, fresh} {
		if err := crossed(m, owner, peer, all, &seed); err != nil {
			return err
		}
	}
	if err := paused(owner, opts.Backend == cistern.BackendMalloc); err != nil {
		return err
	}
	if err := crossed(m, owner, peer, before, &seed); err != nil {
		return fmt.Errorf("after a pause: %w", err)
	}
	if err := handedOver(m, a, owner, peer, &seed); err != nil {
		return fmt.Errorf("memory given back while the peer uses it: %w", err)
	}
	for _, all := range [][]block{before, after, fresh} {
		for _, b := range all {
			if err := a.Free(b.p); err != nil {
				return err
			}
		}
	}
	// What is free moves to where one large block is wanted, or is given back for it; the peer uses that as well.
	large := []block{{size: 8 * m.large, seed: seed, what: "a block as large as many before it"}}
	if large[0].p, err = owner.dev.Alloc(large[0].size, owner.stream); err != nil {
		return err
	}
	if err := m.Fill(id, owner.stream.Handle(), large[0].p, large[0].size, seed); err != nil {
		return err
	}
	if err := m.StreamSynchronize(id, owner.stream.Handle()); err != nil {
		return err
	}
	if err := crossed(m, owner, peer, large, &seed); err != nil {
		return err
	}
	if err := a.Free(large[0].p); err != nil {
		return err
	}
	return finish(m, a, owner, peer, late)
}

// paused takes the physical memory from the owner's blocks and gives them new: contents and access come back. Memory from
// cuMemAlloc stays where it is.
func paused(owner *side, plain bool) error {
	for _, kind := range []string{"", "virtual", "host_numa"} {
		pool := owner.pools[kind]
		if pool == (cistern.Pool{}) || kind == "" && plain {
			continue
		}
		report, err := owner.dev.Pause(cistern.Selection{Pool: pool}, cistern.PauseOptions{Keep: cistern.KeepHost})
		if err != nil {
			return fmt.Errorf("pausing pool %q: %w", kind, err)
		}
		if report.Physical == 0 || report.Kept == 0 {
			return fmt.Errorf("pausing pool %q gave nothing back: %+v", kind, report)
		}
		if _, err := owner.dev.Resume(cistern.Selection{Pool: pool}); err != nil {
			return fmt.Errorf("resuming pool %q: %w", kind, err)
		}
	}
	return nil
}

// handedOver gives blocks back while the peer's check of them is still queued: the next owner of the memory writes it
// only then. Only the default pool reuses at once; the others are tried all the same.
func handedOver(m *machine, a *cistern.Allocator, owner, peer *side, seed *uint64) error {
	id := owner.dev.ID()
	event, err := m.EventCreate(id)
	if err != nil {
		return err
	}
	for i := range 60 {
		pool := owner.pools[kinds[i%len(kinds)]]
		if pool == (cistern.Pool{}) {
			continue
		}
		size := uint64(1+i%9) * m.large / 16
		p, err := pool.Alloc(size, owner.stream)
		if err != nil {
			return err
		}
		*seed++
		err = errors.Join(
			m.Fill(id, owner.stream.Handle(), p, size, *seed),
			m.EventRecord(id, event, owner.stream.Handle()),
			m.StreamWaitEvent(peer.dev.ID(), peer.stream.Handle(), event),
			m.Check(peer.dev.ID(), peer.stream.Handle(), p, size, *seed),
			a.RecordStream(p, peer.stream),
			a.Free(p))
		if err != nil {
			return err
		}
	}
	return errors.Join(m.Wrong(), m.EventDestroy(id, event))
}

// finish gives everything back and looks at what is left.
func finish(m *machine, a *cistern.Allocator, sides ...*side) error {
	for _, s := range sides {
		if err := m.ContextSynchronize(s.dev.ID()); err != nil {
			return err
		}
		if err := balanced(s.dev); err != nil {
			return err
		}
		for kind, p := range s.pools {
			if kind != "" {
				if err := p.Release(); err != nil {
					return err
				}
			}
		}
		if err := s.dev.Trim(); err != nil {
			return err
		}
		if st := s.dev.Stats(); st.Reserved.All.Current != 0 || st.Allocations.All.Current != 0 {
			return fmt.Errorf("device %d: %d bytes and %d blocks are left", s.dev.ID(), st.Reserved.All.Current, st.Allocations.All.Current)
		}
	}
	if err := a.Close(); err != nil {
		return err
	}
	for _, s := range sides {
		for _, up := range s.ups {
			if err := resource.Close(up); err != nil {
				return err
			}
		}
		if err := m.StreamDestroy(s.dev.ID(), s.stream.Handle()); err != nil {
			return err
		}
	}
	return nil
}
