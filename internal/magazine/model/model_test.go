package model

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/internal/rerun"
)

const size = 100

// start is how a run begins.
type start int

const (
	blockFree start = iota
	blockOut        // a thread has the block, and it is known
	blockInMagazine
)

func begin(st start) state {
	var s state
	for l := range s.at {
		s.at[l] = []message{{}}
	}
	s.at[quickFlag][0].value = 1
	s.at[epochOfC][0].value, s.at[epochOfGo][0].value = 1, 1
	d := &s.cells[cellLocked].data
	switch st {
	case blockOut:
		d.used, d.out, d.requested = true, true, size
		s.at[keys][0].value, s.at[infos][0].value = block, size
	case blockInMagazine:
		d.used, d.requested, d.slot, d.slotRequested, d.stamp = true, size, block, size, 1
		s.at[count][0].value, s.at[requested][0].value = 1, size
		s.cells[cellRequested].data.value = size
	}
	return s
}

// How a run ends.
const (
	inMagazine = 1 << iota
	out
	paused
	known
)

// end drains the magazine, and looks for entries that must not be there.
func (m *protocol) end(t *thread) uint64 {
	m.goLock(t)
	r := t.touch(cellLocked, func(d *data) uint64 {
		r := uint64(0)
		if d.slot != 0 {
			r |= inMagazine
		}
		if d.used && d.out {
			r |= out
		}
		if d.paused {
			r |= paused
		}
		return r
	})
	m.drain(t)
	m.goUnlock(t)
	if m.blockTake(t, block) != 0 {
		if r&out == 0 || r&paused != 0 {
			t.broken("an entry is left of a block that is paused or free")
		}
		if m.blockTake(t, block) != 0 {
			t.broken("a block has two entries")
		}
		r |= known
	}
	return r
}

// scene is two threads beside one another.
type scene struct {
	start      start
	one, other func(*protocol, *thread)
	end        func(*protocol, *thread) uint64 // nil: (*protocol).end
	want       []uint64                        // ends that must be seen, else the model tries less than it seems to
}

func (x scene) run(m *protocol) outcome {
	last := x.end
	if last == nil {
		last = (*protocol).end
	}
	return explore(begin(x.start), [threads]func(*thread) uint64{
		func(t *thread) uint64 { x.one(m, t); return 0 },
		func(t *thread) uint64 { x.other(m, t); return 0 },
		func(t *thread) uint64 { return last(m, t) },
	})
}

func take(m *protocol, t *thread) { m.magazineTake(t, size) }

func askGo(m *protocol, t *thread) { m.allocMagazine(t, size) }

func free(m *protocol, t *thread) { m.cisternFree(t, block) }

func takeAndFree(m *protocol, t *thread) {
	if p := m.magazineTake(t, size); p != 0 {
		m.cisternFree(t, p)
	}
}

func askGoAndFree(m *protocol, t *thread) {
	if p := m.allocMagazine(t, size); p != 0 {
		m.cisternFree(t, p)
	}
}

// work is cistern_malloc and cistern_free.
func work(m *protocol, t *thread) {
	p := m.magazineTake(t, size)
	if p == 0 {
		p = m.allocMagazine(t, size)
	}
	if p != 0 {
		m.cisternFree(t, p)
	}
}

// askForOther is given the block as soon as it is free, for another size.
func askForOther(m *protocol, t *thread) {
	if p := m.allocMagazine(t, 2*size); p != 0 {
		m.cisternFree(t, p)
	}
}

func launchAndFree(m *protocol, t *thread) {
	m.launch(t)
	m.cisternFree(t, block)
}

func historyOn(m *protocol, t *thread) { m.setHistory(t, true) }

func historyOff(m *protocol, t *thread) { m.setHistory(t, false) }

func addNames(m *protocol, t *thread) {
	m.magazineAdd(t, 7)
	m.streamAdd(t, 5, 1)
}

func findNames(m *protocol, t *thread) {
	if found := m.streamFind(t); found != 0 && found != 5<<8|7 {
		t.broken("a stream leads to another's magazine")
	}
}

var scenes = map[string]scene{
	"take beside pause":          {start: blockInMagazine, one: take, other: (*protocol).pause, want: []uint64{0, out | paused}},
	"take and free beside pause": {start: blockInMagazine, one: takeAndFree, other: (*protocol).pause, want: []uint64{0}},
	"ask Go beside pause":        {one: askGo, other: (*protocol).pause, want: []uint64{out, out | known, out | paused}},
	"ask Go and free beside pause": {one: askGoAndFree, other: (*protocol).pause,
		want: []uint64{0, inMagazine}},
	"free beside pause":    {start: blockOut, one: free, other: (*protocol).pause, want: []uint64{0}},
	"ask beside restore":   {start: blockOut, one: askForOther, other: (*protocol).restore, want: []uint64{0, inMagazine}},
	"work beside pause":    {start: blockInMagazine, one: work, other: (*protocol).pause, want: []uint64{0, inMagazine}},
	"work beside restore":  {start: blockInMagazine, one: work, other: (*protocol).restore, want: []uint64{0, inMagazine}},
	"work beside work":     {start: blockInMagazine, one: work, other: work, want: []uint64{0, inMagazine}},
	"work beside history":  {start: blockInMagazine, one: work, other: historyOn, want: []uint64{0, inMagazine}},
	"take beside free":     {start: blockOut, one: take, other: free, want: []uint64{inMagazine, out | known}},
	"take beside take":     {start: blockInMagazine, one: take, other: take, want: []uint64{out | known}},
	"free beside sync":     {start: blockOut, one: launchAndFree, other: (*protocol).sync, want: []uint64{0, inMagazine}},
	"free beside history":  {start: blockOut, one: free, other: historyOn, want: []uint64{0, inMagazine}},
	"fails beside history": {one: (*protocol).fails, other: historyOff, end: (*protocol).endOfFailure, want: []uint64{0}},
	"find beside add":      {one: findNames, other: addNames, end: (*protocol).streamFind, want: []uint64{5<<8 | 7}},
}

func (m *protocol) endOfFailure(t *thread) uint64 {
	if m.quick(t) {
		t.broken("quick is on although the context is broken")
	}
	return 0
}

// TestProtocol: nothing that must not happen does, as things are.
func TestProtocol(t *testing.T) {
	for name, x := range scenes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := x.run(&protocol{o: ordersOfC})
			t.Logf("%d states, ends %v", got.states, got.results)
			if len(got.broken) > 0 || got.stuck > 0 {
				t.Errorf("%v; stuck in %d states", got.broken, got.stuck)
			}
			if ends := slices.Sorted(maps.Keys(got.results)); !contains(ends, x.want) {
				t.Errorf("ends %v, want %v among them", ends, x.want)
			}
		})
	}
}

func contains(all, some []uint64) bool {
	for _, x := range some {
		if !slices.Contains(all, x) {
			return false
		}
	}
	return true
}

// TestOldSteps: the model finds what was wrong with each of them.
func TestOldSteps(t *testing.T) {
	before := ordersOfC.with(keyClaim, acquire).with(keyScan, acquire)
	for _, x := range []struct {
		name, scene, broken string
		orders              orders
		old                 old
	}{
		{"an entry was published, and then the turn looked at", "take beside pause",
			"an entry is left of a block that is paused or free", before, old{publishFirst: true}},
		{"so that a paused block came into the magazine", "take and free beside pause",
			"a paused block is in the magazine", before, old{publishFirst: true}},
		{"also one that Go had handed out", "ask Go and free beside pause",
			"a paused block is in the magazine", before, old{publishFirst: true}},
		{"an entry that is claimed was passed by", "take beside pause",
			"an entry is left of a block that is paused or free", ordersOfC, old{passClaimed: true}},
		{"a free did not see that a pause had come and gone", "free beside pause",
			"a paused block is in the magazine", ordersOfC, old{lowerHalf: true}},
		{"a restore left entries of what it had freed for a moment", "ask beside restore",
			"a block is put into the magazine with another's size", ordersOfC, old{restoreWithoutHold: true}},
		{"sizes in the magazine were written by plain stores", "take beside free",
			"a data race", ordersOfC, old{plainEntries: true}},
		{"an epoch was raised without notifying C", "free beside sync",
			"a block is taken for idle that the GPU will use", ordersOfC, old{epochUnseen: true}},
		{"an event before its epoch is raised", "free beside sync",
			"a block is taken for idle that the GPU will use", ordersOfC, old{eventFirst: true}},
		{"quick was asked for before the lock", "free beside history",
			"a free behind SetHistory is not recorded", ordersOfC, old{quickBeforeLock: true}},
		{"a history began while a free was under way", "free beside history",
			"a free behind SetHistory is not recorded", ordersOfC, old{historyAtOnce: true}},
		{"quick was computed and stored without a lock", "fails beside history",
			"quick is on although the context is broken", ordersOfC, old{quickUnlocked: true}},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			if got := scenes[x.scene].run(&protocol{x.orders, x.old}); got.broken[x.broken] == 0 {
				t.Errorf("not found: %s; but %v", x.broken, got.broken)
			}
		})
	}
}

// TestOrdersAreNeeded: with any of these a little weaker something breaks. What the others do is in the package comment, or
// they are relaxed already.
func TestOrdersAreNeeded(t *testing.T) {
	for _, x := range []struct {
		site   site
		to     order
		scene  string
		broken string
	}{
		{keyClaim, acqRel, "take beside pause", "an entry is left of a block that is paused or free"},
		{keyScan, acquire, "take beside pause", "an entry is left of a block that is paused or free"},
		{turnRaise, acqRel, "take beside pause", "an entry is left of a block that is paused or free"},
		{turnLook, acquire, "take beside pause", "an entry is left of a block that is paused or free"},
		{wordLock, relaxed, "take beside free", "a data race"},
		{wordUnlock, relaxed, "take beside free", "a data race"},
		{nameLook, relaxed, "find beside add", "a data race"},
		{nameKeep, relaxed, "find beside add", "a data race"},
	} {
		t.Run(sitesOfC[x.site], func(t *testing.T) {
			t.Parallel()
			got := scenes[x.scene].run(&protocol{o: ordersOfC.with(x.site, x.to)})
			if got.broken[x.broken] == 0 {
				t.Errorf("not found: %s; but %v", x.broken, got.broken)
			}
		})
	}
}

// TestOrders: magazine.c has the orders that are checked here, and no access without one of them.
func TestOrders(t *testing.T) {
	const file = "../../../cmd/libcistern/magazine.c"
	rerun.OnChange(t, file)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	source := string(b)
	names := map[string]order{"RELAXED": relaxed, "ACQUIRE": acquire, "RELEASE": release, "SEQ_CST": seqCst}
	inC := map[string]order{}
	for _, m := range regexp.MustCompile(`(?m)^#define (\w+) __ATOMIC_(\w+)`).FindAllStringSubmatch(source, -1) {
		o, ok := names[m[2]]
		if !ok {
			t.Errorf("%s: no such order is known here", m[0])
		}
		inC[m[1]] = o
		if len(regexp.MustCompile(`\b`+m[1]+`\b`).FindAllString(source, -1)) < 2 {
			t.Errorf("%s is for no access", m[0])
		}
	}
	here := map[string]order{}
	for s, name := range sitesOfC {
		here[name] = ordersOfC[s]
	}
	if !maps.Equal(inC, here) {
		t.Errorf("magazine.c has %v, the model %v", inC, here)
	}
	if n := strings.Count(source, "__ATOMIC_"); n != len(inC) {
		t.Errorf("magazine.c names %d orders, of which %d are definitions", n, len(inC))
	}
}
