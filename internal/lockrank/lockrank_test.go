package lockrank

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
)

func mutexes() *[ranks]Mutex {
	m := new([ranks]Mutex)
	for r := range m {
		m[r].Rank = Rank(r)
	}
	return m
}

func checked(t *testing.T) {
	if !checking {
		checking = true
		t.Cleanup(func() { checking = false })
	}
}

// violation is what a function panics with.
func violation(f func()) (text string) {
	defer func() {
		if x := recover(); x != nil {
			text = fmt.Sprint(x)
		}
	}()
	f()
	return ""
}

// Every pair of ranks: the order is what the constants say.
func TestOrder(t *testing.T) {
	checked(t)
	for a := Keeping; a < ranks; a++ {
		for b := Keeping; b < ranks; b++ {
			m, other := mutexes(), Mutex{Rank: b}
			m[a].Lock()
			got := violation(func() {
				other.Lock()
				defer other.Unlock()
			})
			m[a].Unlock()
			switch {
			case a < b && !a.leaf():
				if got != "" {
					t.Errorf("%s, then %s: %s", a, b, got)
				}
			case !strings.Contains(got, b.String()+" is locked while "+a.String()+" is held"):
				t.Errorf("%s, then %s: %q", a, b, got)
			}
			if held := holds(Goroutine()); held != [ranks]int32{} {
				t.Fatalf("%s, then %s: held afterwards: %v", a, b, held)
			}
		}
	}
}

func TestSecondLock(t *testing.T) {
	checked(t)
	for r := Keeping; r < ranks; r++ {
		m := Mutex{Rank: r}
		m.Lock()
		if got := violation(m.Lock); !strings.Contains(got, r.String()+" is locked a second time") {
			t.Errorf("%s: %q", r, got)
		}
		if m.TryLock() {
			t.Errorf("%s was locked twice", r)
		}
		m.Unlock()
	}
	var m Mutex
	if got := violation(m.Lock); !strings.Contains(got, "without rank") {
		t.Errorf("a mutex without rank: %q", got)
	}
}

func TestSeveralArenas(t *testing.T) {
	checked(t)
	dev, a, b := Mutex{Rank: Device}, Mutex{Rank: Arena}, Mutex{Rank: Arena}
	dev.Lock()
	a.Lock()
	b.Lock()
	if got := violation(a.Lock); !strings.Contains(got, "a second time") {
		t.Errorf("an arena that is held: %q", got)
	}
	if got := violation(func() { HoldsNone(Arena, "a call") }); !strings.Contains(got, "a call while arena.Arena.mu is held") {
		t.Errorf("%q", got)
	}
	b.Unlock()
	a.Unlock()
	HoldsNone(Arena, "a call")
	dev.Unlock()
	if !a.TryLock() {
		t.Fatal("an arena that is not held")
	}
	if got := violation(b.Lock); !strings.Contains(got, "arena.Arena.mu is locked while arena.Arena.mu is held") {
		t.Errorf("two arenas without the device's lock: %q", got)
	}
	a.Unlock()
}

// What one goroutine holds is nothing to another, wherever their stacks lie, and another may unlock.
func TestGoroutines(t *testing.T) {
	checked(t)
	m := mutexes()
	m[History].Lock()
	var wg sync.WaitGroup
	seen := sync.Map{}
	all := sync.WaitGroup{}
	all.Add(300)
	for range 300 {
		wg.Go(func() {
			g := Goroutine()
			if _, twice := seen.LoadOrStore(g, true); twice {
				t.Error("two goroutines have the same number")
			}
			all.Done()
			all.Wait() // all of them run at once
			own := mutexes()
			for r := Keeping; r <= Allocator; r++ {
				own[r].Lock()
			}
			grow(100)
			runtime.GC()
			if Goroutine() != g {
				t.Error("a goroutine has another number after its stack has moved")
			}
			for r := Keeping; r <= Allocator; r++ {
				own[r].Unlock()
			}
		})
	}
	wg.Wait()
	wg.Go(m[History].Unlock)
	wg.Wait()
	if got := violation(m[Keeping].Lock); got != "" {
		t.Errorf("a lock that another goroutine unlocked is still held: %s", got)
	}
	m[Keeping].Unlock()
}

func grow(n int) byte {
	var buf [1 << 10]byte
	if n > 0 {
		buf[n] = grow(n - 1)
	}
	return buf[n]
}

// In steady state the check allocates no memory, as the engine does not.
func TestNoAllocations(t *testing.T) {
	checked(t)
	m := mutexes()
	if n := testing.AllocsPerRun(100, func() {
		for r := Keeping; r <= Allocator; r++ {
			m[r].Lock()
		}
		for r := Keeping; r <= Allocator; r++ {
			m[r].Unlock()
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Where nothing is checked a Mutex is a sync.Mutex.
func TestUnchecked(t *testing.T) {
	if checking {
		t.Skip("built with the tag lockrank")
	}
	m := mutexes()
	m[History].Lock()
	m[Keeping].Lock()
	HoldsNone(Keeping, "nothing")
	if m[History].TryLock() || m[History].owner.Load() != 0 {
		t.Error("an unchecked mutex")
	}
	m[History].Unlock()
	m[Keeping].Unlock()
}
