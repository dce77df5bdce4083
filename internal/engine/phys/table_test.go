package phys_test

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/cistern-gpu/cistern/internal/engine/phys"
)

// claimed is what the model of a table knows: the claims of one owner each, the later over the earlier.
type claimed struct {
	base, size uint64
	owner      *int
}

// TestTable: a table says of every address what a list of claims says.
func TestTable(t *testing.T) {
	const unit = phys.RegionBytes / 8 // so that claims lie within regions, over several, and fill some
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 3))
		table := &phys.Table[int]{}
		var list []claimed
		last := func(p uint64) *claimed {
			for i := len(list) - 1; i >= 0; i-- {
				if c := &list[i]; p-c.base < c.size {
					return c
				}
			}
			return nil
		}
		over := func(i int) bool { // whether another claim lies over this one
			for _, c := range list[i+1:] {
				if c.base < list[i].base+list[i].size && list[i].base < c.base+c.size {
					return true
				}
			}
			return false
		}
		for range 200 {
			if i := rng.IntN(len(list) + 3); i < len(list) {
				if over(i) {
					continue
				}
				table.Remove(list[i].base, list[i].size)
				list = append(list[:i], list[i+1:]...)
			} else {
				c := claimed{base: (8 + rng.Uint64N(64)) * unit, size: (1 + rng.Uint64N(20)) * unit, owner: new(int)}
				free, within := true, (*claimed)(nil)
				for p := c.base; p < c.base+c.size; p += unit {
					if under := last(p); under != nil {
						free, within = false, under
					}
				}
				// A claim may be over another one where it lies in it, and in no third.
				nested := within != nil && within.base <= c.base && c.base+c.size <= within.base+within.size
				for p := c.base; p < c.base+c.size && nested; p += unit {
					nested = last(p) == within
				}
				err := table.Add(c.base, c.size, c.owner, func(o *int) bool { return nested && o == within.owner })
				if (err == nil) != (free || nested) {
					t.Fatalf("seed %d: claim of [%#x, %#x): %v", seed, c.base, c.base+c.size, err)
				}
				if err == nil {
					list = append(list, c)
				}
			}
			for p := uint64(0); p < 100*unit; p += unit {
				for _, p := range []uint64{p, p + unit - 1} {
					want := last(p)
					owner, claim := table.Find(p), table.Claim(p)
					if want == nil && (owner != nil || claim != nil) {
						t.Fatalf("seed %d: %#x has an owner", seed, p)
					}
					if want != nil && (owner != want.owner || claim.Owner != owner || claim.Base != want.base || claim.Size != want.size) {
						t.Fatalf("seed %d: %#x has another owner than that of [%#x, %#x)", seed, p, want.base, want.base+want.size)
					}
				}
			}
		}
	}
}

// TestTableBounds: addresses beyond the table have no owner, and none can be claimed.
func TestTableBounds(t *testing.T) {
	table := &phys.Table[int]{}
	never := func(*int) bool { return false }
	if err := table.Add(1<<48-phys.RegionBytes, 2*phys.RegionBytes, new(int), never); err == nil {
		t.Error("a range above 48 bits was taken")
	}
	if err := table.Add(1<<48-phys.RegionBytes, phys.RegionBytes, new(int), never); err != nil {
		t.Error(err)
	}
	if table.Find(1<<48-1) == nil || table.Find(1<<48) != nil || table.Find(1<<64-1) != nil || table.Claim(1<<48) != nil {
		t.Error("the end of the address space is not where it should be")
	}
}

// TestTableReaders: lookups go on, without a lock, while others claim and disown, and allocate nothing.
func TestTableReaders(t *testing.T) {
	table := &phys.Table[int]{}
	stays := new(int)
	never := func(*int) bool { return false }
	if err := table.Add(phys.RegionBytes, 1<<20, stays, never); err != nil {
		t.Fatal(err)
	}
	var readers sync.WaitGroup
	done := make(chan bool)
	for range 2 {
		readers.Add(1)
		go func() {
			defer readers.Done()
			for {
				select {
				case <-done:
					return
				default:
				}
				if table.Find(phys.RegionBytes+5) != stays {
					t.Error("a claim was missed while another changed")
					return
				}
				table.Find(phys.RegionBytes + 3<<20)
			}
		}()
	}
	for range 2000 {
		if err := table.Add(phys.RegionBytes+2<<20, 4<<20, new(int), never); err != nil {
			t.Error(err)
		}
		table.Remove(phys.RegionBytes+2<<20, 4<<20)
	}
	close(done)
	readers.Wait()
	if n := testing.AllocsPerRun(100, func() { table.Find(phys.RegionBytes + 5) }); n != 0 {
		t.Errorf("a lookup allocates %v times", n)
	}
}

// TestRanges: a segment that is a block of another pool may begin where that one's does, and each is dropped by itself.
func TestRanges(t *testing.T) {
	var r phys.Ranges
	r.Add(phys.Range{Base: 100, Size: 50, Owner: 1, Serial: 1})
	r.Add(phys.Range{Base: 100, Size: 20, Owner: 2, Serial: 2, Align: 4})
	r.Add(phys.Range{Base: 200, Size: 50, Owner: 1, Serial: 3})
	if got := r.Of(2, 100); got.Align != 4 {
		t.Errorf("the inner range is %+v", got)
	}
	if got, ok := r.At(110); !ok || got.Serial != 1 {
		t.Errorf("the outermost range is %+v", got)
	}
	if r.Bytes() != 120 {
		t.Errorf("%d bytes", r.Bytes())
	}
	r.Drop(2, 100)
	if got, ok := r.At(110); !ok || got.Serial != 1 || len(r.All()) != 2 {
		t.Errorf("dropping the inner range left %+v", r.All())
	}
	if _, ok := r.At(150); ok {
		t.Error("a range has no end")
	}
}

// TestArea: an area says what a map of granules says, and lists chunks that lie wholly within a range.
func TestArea(t *testing.T) {
	f := newFixture(t)
	rng := rand.New(rand.NewPCG(1, 1))
	a := phys.NewArea(granule)
	a.AddRange(f.base, f.size/2)
	a.AddRange(f.base+f.size, f.size)
	want := map[uint64]phys.ChunkID{}
	ids := []phys.ChunkID{f.create(1), f.create(2), f.create(3)}
	for range 100 {
		id := ids[rng.IntN(len(ids))]
		at := f.base + rng.Uint64N(f.size/2/granule-3)*granule
		if rng.IntN(2) == 0 {
			at += f.size
		}
		size := f.Chunk(id).Size
		if rng.IntN(4) == 0 {
			id = 0
		}
		a.Set(at, size, id)
		for p := at; p < at+size; p += granule {
			want[p] = id
		}
	}
	for p := f.base; p < f.base+2*f.size; p += granule / 2 {
		if got := a.At(p); got != want[p/granule*granule] {
			t.Errorf("at %#x is chunk %d, want %d", p, got, want[p])
		}
	}
	if a.DropRange(f.base); a.Reserved() != f.size || a.At(f.base) != 0 {
		t.Error("a range that was dropped is still there")
	}

	a = phys.NewArea(granule)
	a.AddRange(f.base, f.size)
	at := f.base
	f.Assign(at, 0, 0, ids...)
	for _, id := range ids {
		a.Set(f.Chunk(id).Addr, f.Chunk(id).Size, id)
	}
	var whole []phys.ChunkID
	a.Whole(f.Memory, f.base+granule/2, 5*granule, func(id phys.ChunkID, _ *phys.Chunk) bool {
		whole = append(whole, id)
		return true
	})
	if len(whole) != 1 || whole[0] != ids[1] {
		t.Errorf("%v lie in the range, want %d", whole, ids[1])
	}
}
