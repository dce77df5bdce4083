package phys_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
)

const granule = 2 << 20

// all chooses every chunk.
func all(phys.ChunkID) bool { return true }

// fixture is a Memory on the simulated device, with one reservation.
type fixture struct {
	*phys.Memory
	t     testing.TB
	sim   *sim.Driver
	quota *quota.Device
	base  uint64
	size  uint64
	ids   map[phys.ChunkID]bool // those that were created and are not gone
}

// upstream makes chunks of the device.
type upstream struct{ drv cuda.Driver }

func (u upstream) Create(size uint64) (cuda.Handle, error) {
	return u.drv.MemCreate(size, cuda.MemProp{})
}
func (u upstream) Release(h cuda.Handle) error { return u.drv.MemRelease(h) }

func newFixture(t testing.TB) *fixture {
	drv := sim.New(sim.Options{Capacity: 1 << 30, Granularity: granule})
	if err := drv.RetainContext(0); err != nil {
		t.Fatal(err)
	}
	f := &fixture{t: t, sim: drv, quota: &quota.Device{}, ids: map[phys.ChunkID]bool{}}
	h := health.New(drv, 0)
	f.Memory = phys.New(h, f.quota, upstream{h.Driver})
	var err error
	if f.base, f.size, err = f.Reserve(64*granule, granule, granule); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *fixture) create(granules uint64) phys.ChunkID {
	id, err := f.Create(granules * granule)
	if err != nil {
		f.t.Fatal(err)
	}
	f.ids[id] = true
	return id
}

// mapped makes chunks of 1, 2 and 3 granules that are mapped at an address, owned by 0.
func (f *fixture) mapped(addr uint64) []phys.ChunkID {
	ids := []phys.ChunkID{f.create(1), f.create(2), f.create(3)}
	if left, err := f.Map(addr, ids); err != nil || left != nil {
		f.t.Fatal(left, err)
	}
	f.Assign(addr, 0, quota.Small, ids...)
	return ids
}

// state is everything that can be seen of a Memory and of the driver.
func (f *fixture) state() string {
	s := fmt.Sprintln(f.Spares(), f.Stale.All(), f.Ranges.All(), *f.quota, f.sim.Mappings(0))
	for id := phys.ChunkID(1); int(id) < 100; id++ {
		if f.ids[id] {
			s += fmt.Sprintln(id, *f.Chunk(id))
		}
	}
	handles := f.sim.Handles(0)
	slices.SortFunc(handles, func(a, b sim.HandleInfo) int { return int(a.Handle) - int(b.Handle) })
	return s + fmt.Sprintln(handles)
}

// failFrom makes the driver fail at its n-th call from now on, and at those after it that also names; it returns how to end
// that.
func (f *fixture) failFrom(n int, also string) (end func()) {
	from := f.sim.CallNumber() + uint64(n)
	f.sim.FailCall(func(call string, at uint64) cuda.Code {
		if at == from || at > from && call == also {
			return cuda.ErrInvalidValue
		}
		return cuda.Success
	})
	return func() { f.sim.FailCall(nil) }
}

// TestFailures: whichever driver call of a method fails, the state is as it was.
func TestFailures(t *testing.T) {
	tests := []struct {
		name  string
		calls int // of the driver
		setUp func(f *fixture) (run func() error)
	}{
		{"Create", 1, func(f *fixture) func() error {
			return func() error { _, err := f.Create(granule); return err }
		}},
		{"Map", 4, func(f *fixture) func() error {
			ids := []phys.ChunkID{f.create(1), f.create(2), f.create(3)}
			return func() error { _, err := f.Map(f.base, ids); return err }
		}},
		{"Map of mapped chunks", 4, func(f *fixture) func() error {
			ids := f.mapped(f.base)
			return func() error { _, err := f.Map(f.base+6*granule, ids); return err }
		}},
		{"Unmap", 1, func(f *fixture) func() error {
			ids := f.mapped(f.base)
			return func() error { return f.Unmap(f.base, ids) }
		}},
		{"Release", 1, func(f *fixture) func() error {
			id := f.create(1)
			return func() error { return f.Release(id) }
		}},
		{"Renew", 1, func(f *fixture) func() error {
			id := f.create(1)
			if err := f.Release(id); err != nil {
				f.t.Fatal(err)
			}
			return func() error { return f.Renew(id) }
		}},
		{"ReleaseSpares", 1, func(f *fixture) func() error {
			f.AddSpare(f.create(1), -1, 0)
			return func() error { _, err := f.ReleaseSpares(all); return err }
		}},
		{"Reap", 1, func(f *fixture) func() error {
			f.Leave(f.mapped(f.base)[1], 7, 3, 9, false)
			return func() error {
				if len(f.Reap(func(phys.StaleMapping) bool { return true })) == 0 {
					return cuda.ErrInvalidValue
				}
				return nil
			}
		}},
		{"Reserve", 1, func(f *fixture) func() error {
			return func() error { _, _, err := f.Reserve(granule, granule, granule); return err }
		}},
		{"FreeAddresses", 1, func(f *fixture) func() error {
			return func() error { return f.FreeAddresses(f.base, f.size) }
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			run := tt.setUp(f)
			before := f.state()
			for n := 1; n <= tt.calls; n++ {
				end := f.failFrom(n, "")
				err := run()
				end()
				if err == nil {
					t.Fatalf("call %d of %d failed, and the method did not", n, tt.calls)
				}
				if after := f.state(); after != before {
					t.Fatalf("call %d failed: the state was\n%sand is\n%s", n, before, after)
				}
			}
			from := f.sim.CallNumber()
			if err := run(); err != nil {
				t.Fatalf("nothing failed: %v", err)
			}
			if n := f.sim.CallNumber() - from; n != uint64(tt.calls) {
				t.Errorf("it took %d driver calls, not %d: some were not made to fail", n, tt.calls)
			}
		})
	}
}

// TestUndoFails: what Map cannot undo is returned, stays counted, and goes once Reap can unmap it.
func TestUndoFails(t *testing.T) {
	for n := 1; n <= 4; n++ {
		f := newFixture(t)
		ids := []phys.ChunkID{f.create(1), f.create(2), f.create(3)}
		before := f.state()
		end := f.failFrom(n, "cuMemUnmap")
		left, err := f.Map(f.base, ids)
		if err == nil {
			t.Fatalf("call %d failed, and Map did not", n)
		}
		if want := ids[:n-1]; !slices.Equal(left, want) || len(f.sim.Mappings(0)) != len(want) {
			t.Errorf("call %d failed: %v stay mapped, the driver has %v; want %v", n, left, f.sim.Mappings(0), want)
		}
		f.Defer(f.base, left)
		over := func(phys.StaleMapping) bool { return true }
		if reaped := f.Reap(over); len(reaped) != 0 || f.Stale.Len() != n-1 {
			t.Errorf("call %d failed: %v were reaped while the driver fails, %d wait", n, reaped, f.Stale.Len())
		}
		for _, id := range ids {
			want := int32(0)
			if slices.Contains(left, id) {
				want = 1
			}
			if got := f.Chunk(id).Mappings; got != want {
				t.Errorf("call %d failed: chunk %d counts %d mappings, not %d", n, id, got, want)
			}
		}
		end()
		if reaped := f.Reap(over); len(reaped) != n-1 {
			t.Errorf("call %d failed: %v were reaped, not %d", n, reaped, n-1)
		}
		if after := f.state(); after != before {
			t.Errorf("call %d failed: the state was\n%sand is\n%s", n, before, after)
		}
	}
}

// TestGiveBack: a chunk that cannot be released, or is still mapped elsewhere, is spare.
func TestGiveBack(t *testing.T) {
	f := newFixture(t)
	ids := f.mapped(f.base)
	if err := f.Unmap(f.base, ids); err != nil {
		t.Fatal(err)
	}
	f.Defer(f.base, nil)
	end := f.failFrom(1, "")
	if f.GiveBack(ids[0]) {
		t.Error("a chunk went whose handle the driver did not take back")
	}
	end()
	if _, err := f.Map(f.base, ids[1:2]); err != nil {
		t.Fatal(err)
	}
	if f.GiveBack(ids[1]) {
		t.Error("a chunk went that is mapped")
	}
	if !f.GiveBack(ids[2]) {
		t.Error("a chunk that is mapped nowhere stayed")
	}
	if want := ids[:2]; !slices.Equal(f.Spares(), want) || f.quota.Spare != 3*granule || f.quota.Reserved != 3*granule {
		t.Errorf("spare are %v, %d of %d bytes; want %v", f.Spares(), f.quota.Spare, f.quota.Reserved, want)
	}
	if n, err := f.ReleaseSpares(all); n != 1 || err != nil || !slices.Equal(f.Spares(), ids[1:2]) {
		t.Errorf("%d spares went, %v is left: %v", n, f.Spares(), err)
	}
}

// TestRenew: a chunk whose handle was released counts on, and is given back without a second release, or gets another handle.
func TestRenew(t *testing.T) {
	f := newFixture(t)
	ids := f.mapped(f.base)
	if err := f.Unmap(f.base, ids); err != nil {
		t.Fatal(err)
	}
	was := *f.Chunk(ids[0])
	for _, id := range ids[:2] {
		if err := f.Release(id); err != nil {
			t.Fatal(err)
		}
	}
	if f.quota.Reserved != 6*granule || f.sim.ReservedBytes(0) != 3*granule {
		t.Errorf("%d bytes count as reserved, the driver has %d", f.quota.Reserved, f.sim.ReservedBytes(0))
	}
	if err := f.Renew(ids[0]); err != nil {
		t.Fatal(err)
	}
	if k := f.Chunk(ids[0]); k.Released || k.Serial == was.Serial || k.Size != was.Size || k.Owner != was.Owner {
		t.Errorf("the chunk was %+v and is %+v", was, *k)
	}
	for _, id := range ids {
		if !f.GiveBack(id) {
			t.Errorf("chunk %d stays", id)
		}
	}
	if n := f.sim.Calls().Calls["cuMemRelease"].Count; n != 4 || f.quota.Reserved != 0 || f.sim.ReservedBytes(0) != 0 {
		t.Errorf("after %d releases %d bytes are reserved", n, f.quota.Reserved)
	}
}

// TestReserveHalves: where there is no room for what is wanted, less is reserved, in whole units and never less than the least.
func TestReserveHalves(t *testing.T) {
	for least, want := range map[uint64]uint64{3: 13, 18: 18, 21: 0} {
		m := phys.New(health.New(sim.New(sim.Options{Granularity: granule, AddressSpace: 20 * granule}), 0), &quota.Device{}, nil)
		_, size, err := m.Reserve(100*granule, least*granule-1, granule)
		if size != want*granule || (err == nil) != (want != 0) {
			t.Errorf("%d granules were reserved of 20, want %d: %v", size/granule, want, err)
		}
	}
}

// broken is a driver that gives no access where a peer is among the devices.
type broken struct {
	cuda.Driver
	code cuda.Code
}

func (b broken) MemSetAccess(p cuda.Ptr, size uint64, devices []cuda.Device) error {
	if len(devices) > 1 {
		return b.code
	}
	return b.Driver.MemSetAccess(p, size, devices)
}

// TestAccess: a peer whose context is broken does not keep the device from its memory; any other error does.
func TestAccess(t *testing.T) {
	for code, want := range map[cuda.Code]error{cuda.ErrInvalidValue: cuda.ErrInvalidValue, cuda.ErrIllegalAddress: nil} {
		drv := sim.New(sim.Options{Devices: 2, Granularity: granule})
		if err := drv.RetainContext(0); err != nil {
			t.Fatal(err)
		}
		h := health.New(broken{drv, code}, 0)
		m := phys.New(h, &quota.Device{}, upstream{h.Driver})
		m.Access.Add(1)
		if got := m.Access.Devices(); !slices.Equal(got, []cuda.Device{0, 1}) {
			t.Errorf("the memory is accessible to %v", got)
		}
		base, _, err := m.Reserve(granule, granule, granule)
		if err != nil {
			t.Fatal(err)
		}
		id, err := m.Create(granule)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Map(base, []phys.ChunkID{id}); !errors.Is(err, want) {
			t.Errorf("access to a peer fails with %v: mapping ends with %v, want %v", code, err, want)
		}
	}
}

// model says of each chunk what a Memory should: where it is mapped, and whose it is.
type model struct {
	*fixture
	rng    *rand.Rand
	chunks map[phys.ChunkID]*modelChunk
	taken  map[uint64]phys.ChunkID // granules that are mapped
	stale  map[uint64]bool         // addresses of stale mappings
}

type modelChunk struct {
	size  uint64
	addr  uint64 // where it is owned, 0: nowhere
	spare bool
	class int
	maps  int32
}

// room is an address at which so many bytes can be mapped, 0 where there is none.
func (m *model) room(size uint64) uint64 {
	for range 20 {
		at := m.base + m.rng.Uint64N(m.size/granule)*granule
		free := at+size <= m.base+m.size
		for p := at; p < at+size && free; p += granule {
			free = m.taken[p] == 0
		}
		if free {
			return at
		}
	}
	return 0
}

func (m *model) setTaken(addr, size uint64, id phys.ChunkID) {
	for p := addr; p < addr+size; p += granule {
		if m.taken[p] = id; id == 0 {
			delete(m.taken, p)
		}
	}
}

// pick are up to n chunks for which ok holds.
func (m *model) pick(n int, ok func(*modelChunk) bool) (ids []phys.ChunkID) {
	for id := phys.ChunkID(1); id < 100; id++ {
		if k := m.chunks[id]; k != nil && ok(k) {
			ids = append(ids, id)
		}
	}
	m.rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids[:min(n, len(ids))]
}

// step does something at random; the driver may fail at any call.
func (m *model) step() {
	owned := func(k *modelChunk) bool { return k.addr != 0 }
	switch m.rng.IntN(6) {
	case 0:
		if id, err := m.Create((1 + m.rng.Uint64N(3)) * granule); err == nil {
			m.AddSpare(id, -1, 0)
			m.ids[id] = true
			m.chunks[id] = &modelChunk{size: m.Chunk(id).Size, spare: true}
		}
	case 1, 2: // remap, or map spare ones
		m.remap(m.pick(1+m.rng.IntN(4), func(*modelChunk) bool { return true }))
	case 3: // unmap, and give back
		for _, id := range m.pick(1, owned) {
			k := m.chunks[id]
			if m.Unmap(k.addr, []phys.ChunkID{id}) != nil {
				continue
			}
			m.setTaken(k.addr, k.size, 0)
			if k.maps--; m.GiveBack(id) {
				delete(m.ids, id)
				delete(m.chunks, id)
			} else {
				k.addr, k.spare = 0, true
			}
		}
	case 4:
		m.ReleaseSpares(all)
		for id, k := range m.chunks {
			if k.spare && !slices.Contains(m.Spares(), id) {
				delete(m.ids, id)
				delete(m.chunks, id)
				if k.maps != 0 {
					m.t.Errorf("chunk %d is mapped and was released", id)
				}
			}
		}
	case 5:
		odd := m.rng.IntN(2) == 0
		for _, z := range m.Reap(func(z phys.StaleMapping) bool { return z.Owner < 0 || z.Epoch%2 == 0 == odd }) {
			k := m.chunks[z.Chunk]
			k.maps--
			delete(m.stale, z.Addr)
			m.setTaken(z.Addr, k.size, 0)
		}
	}
}

// remap maps chunks behind one another at a new place, which they leave their old ones for.
func (m *model) remap(ids []phys.ChunkID) {
	size := uint64(0)
	for _, id := range ids {
		size += m.chunks[id].size
	}
	at := m.room(size)
	if at == 0 || size == 0 {
		return
	}
	left, err := m.Map(at, ids)
	addr := at
	for i, id := range ids {
		k := m.chunks[id]
		if err == nil || i < len(left) {
			k.maps++
			m.setTaken(addr, k.size, id)
			m.stale[addr] = err != nil
		}
		addr += k.size
	}
	if m.Defer(at, left); err != nil {
		return
	}
	for _, id := range ids {
		if k := m.chunks[id]; !k.spare {
			m.stale[k.addr] = true
			m.Leave(id, 1, 2, m.rng.Uint64N(10), true)
		}
	}
	class := m.rng.IntN(quota.NumClasses)
	m.Assign(at, 5, class, ids...)
	for _, id := range ids {
		k := m.chunks[id]
		k.addr, k.spare, k.class = at, false, class
		at += k.size
	}
}

// check compares all with the driver and the model.
func (m *model) check() {
	var reserved, spare uint64
	var groups [quota.NumGroups]int64
	var spares []phys.ChunkID
	for id, k := range m.chunks {
		got := m.Chunk(id)
		if got.Mappings != k.maps || got.Addr != k.addr || got.Size != k.size || (got.Owner < 0) != k.spare {
			m.t.Fatalf("chunk %d is %+v, want %+v", id, *got, *k)
		}
		reserved += k.size
		group := quota.GroupLarge
		if k.spare {
			spares = append(spares, id)
			spare += k.size
		} else {
			group = quota.GroupOf(k.class)
		}
		groups[quota.GroupAll] += int64(k.size)
		groups[group] += int64(k.size)
	}
	have := slices.Clone(m.Spares())
	slices.Sort(have)
	slices.Sort(spares)
	if !slices.Equal(have, spares) || m.quota.Spare != spare || m.quota.Reserved != reserved || m.sim.ReservedBytes(0) != reserved {
		m.t.Fatalf("%d bytes are reserved, %d by the driver, want %d; %d spare, want %d: %v, want %v",
			m.quota.Reserved, m.sim.ReservedBytes(0), reserved, m.quota.Spare, spare, have, spares)
	}
	for g, want := range groups {
		if got := m.quota.Physical[g].Bytes.Current; got != want {
			m.t.Fatalf("group %d counts %d bytes, want %d", g, got, want)
		}
	}
	driver := map[uint64]phys.ChunkID{}
	for _, x := range m.sim.Mappings(0) {
		for p := uint64(x.Addr); p < uint64(x.Addr)+x.Size; p += granule {
			driver[p] = m.taken[p]
			if id := m.taken[p]; id == 0 || m.Chunk(id).Handle != x.Handle {
				m.t.Fatalf("the driver has handle %d at %#x, want chunk %d", x.Handle, p, id)
			}
		}
	}
	if !reflect.DeepEqual(driver, m.taken) {
		m.t.Fatalf("mapped are %v, want %v", driver, m.taken)
	}
	for _, z := range m.Stale.All() {
		if !m.stale[z.Addr] {
			m.t.Fatalf("%+v is a stale mapping of nothing", z)
		}
	}
}

// TestRandom: creating, mapping, moving, unmapping and giving back in any order, with driver calls that fail, leave what a naive
// model says; at the end everything goes.
func TestRandom(t *testing.T) {
	for seed := range uint64(20) {
		m := &model{fixture: newFixture(t), rng: rand.New(rand.NewPCG(seed, 1)), chunks: map[phys.ChunkID]*modelChunk{},
			taken: map[uint64]phys.ChunkID{}, stale: map[uint64]bool{}}
		faults := rand.New(rand.NewPCG(seed, 2))
		m.sim.FailCall(func(string, uint64) cuda.Code {
			if seed%2 == 1 && faults.IntN(5) == 0 {
				return cuda.ErrInvalidValue
			}
			return cuda.Success
		})
		for range 300 {
			m.step()
			m.check()
		}
		m.sim.FailCall(nil)
		m.Reap(func(phys.StaleMapping) bool { return true })
		for id, k := range m.chunks {
			if k.spare {
				continue
			}
			if err := m.Unmap(k.addr, []phys.ChunkID{id}); err != nil {
				t.Fatal(err)
			}
			if !m.GiveBack(id) {
				t.Errorf("chunk %d stays", id)
			}
		}
		if _, err := m.ReleaseSpares(all); err != nil {
			t.Fatal(err)
		}
		if err := m.FreeAddresses(m.base, m.size); err != nil {
			t.Fatal(err)
		}
		if got := m.sim.Leaks(); got != (sim.Live{}) || m.quota.Reserved != 0 || m.Stale.Len() != 0 {
			t.Errorf("seed %d: %+v is left, %d bytes are counted, %d mappings are stale", seed, got, m.quota.Reserved, m.Stale.Len())
		}
	}
}
