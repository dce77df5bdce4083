package replay

import (
	"container/heap"
	"math/rand/v2"
	"time"
)

// Two runs of a program differ in what no recording fixes: where the driver puts segments, by which best fit breaks ties; how
// far the GPU is behind the host; when other streams are done with a block. A draw is one choice of all three. Draw 0 is what
// was recorded, as far as the file says: recorded addresses where the policy is the run's own, and rising ones elsewhere. The
// others are random, and the same for the same number.

// draw is one such choice.
type draw struct {
	n   int
	key [4]uint64 // of the permutation of addresses
	rng *rand.Rand
}

func newDraw(n int) *draw {
	if n == 0 {
		return nil
	}
	d := &draw{n: n, rng: rand.New(rand.NewPCG(uint64(n), 0x9E3779B97F4A7C15))}
	for i := range d.key {
		d.key[i] = d.rng.Uint64()
	}
	return d
}

// orderBits is how many segments lie in a random order; the addresses of later ones rise.
const orderBits = 20

// slot is the place of the n-th segment among 1<<orderBits: a permutation by Feistel's construction.
func (d *draw) slot(n uint64) uint64 {
	const half = orderBits / 2
	const mask = 1<<half - 1
	left, right := n>>half, n&mask
	for _, k := range d.key {
		x := (right ^ k) * 0xBF58476D1CE4E5B9
		x = (x ^ x>>27) * 0x94D049BB133111EB
		left, right = right, (left^x>>40)&mask
	}
	return left<<half | right
}

// farLag is how far a GPU may be behind the host: training steps take about as long.
const farLag = 500 * time.Millisecond

// lag is how far the GPU is behind the host: as given, not at all, or far, but no more than a part of the run, or nothing would
// ever be done.
func (d *draw) lag(given time.Duration, run time.Duration) time.Duration {
	if d == nil {
		return given
	}
	switch d.n % 4 {
	case 1:
		return 0
	case 3:
		return min(farLag, run/4)
	}
	return given
}

// SameDraw is a draw in which a run of the policy does what it does in draw n, the same for all of those: PyTorch's allocator looks
// at addresses, the engine at what the GPU has done, and other models at neither. Records in which no free is delayed leave a draw
// nothing else.
func (p *Plan) SameDraw(spec Spec, n int) int {
	if n == 0 || p.delayed != nil {
		return n
	}
	switch spec.Name {
	case "cistern":
		if n%4 == 0 {
			return 2 // the lag that was given too
		}
		return n % 4
	case "torch-async", "rmm-pool", "direct":
		return 1
	}
	return n
}

// completions are the frees that other streams delay: each completes after half to twice the time that it took in the record.
type completions struct {
	draw *draw
	due  dueFrees
	away []bool // by block: it completes, or did, when it is due and not where the record has it
}

// dueFree is a block that other streams use until a time.
type dueFree struct {
	us    int64
	block int
}

type dueFrees []dueFree

func (f dueFrees) Len() int { return len(f) }
func (f dueFrees) Less(i, j int) bool {
	return f[i].us < f[j].us || f[i].us == f[j].us && f[i].block < f[j].block
}
func (f dueFrees) Swap(i, j int) { f[i], f[j] = f[j], f[i] }
func (f *dueFrees) Push(x any)   { *f = append(*f, x.(dueFree)) }
func (f *dueFrees) Pop() any {
	last := len(*f) - 1
	x := (*f)[last]
	*f = (*f)[:last]
	return x
}

// newCompletions is nil where the record delays no free, or the draw is what was recorded.
func newCompletions(p *Plan, d *draw) *completions {
	if d == nil || p.delayed == nil {
		return nil
	}
	return &completions{draw: d, away: make([]bool, p.Blocks)}
}

// requested notes a block that was given back at a time and completed, in the record, at another.
func (c *completions) requested(block int, us, completed int64) {
	if c == nil || completed <= us {
		return
	}
	took := float64(completed-us) * (0.5 + 1.5*c.draw.rng.Float64())
	c.away[block] = true
	heap.Push(&c.due, dueFree{us + int64(took), block})
}

// next takes out a block whose time has come.
func (c *completions) next(us int64) (block int, ok bool) {
	if c == nil || len(c.due) == 0 || c.due[0].us > us {
		return 0, false
	}
	return heap.Pop(&c.due).(dueFree).block, true
}

// moved reports whether a block completes at a time of the draw's.
func (c *completions) moved(block int) bool { return c != nil && c.away[block] }
