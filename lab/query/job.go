package query

import (
	"math/rand/v2"
	"slices"
)

// The job: queries as a data-frame library runs them. Everything a query does to memory is decided here, from a seed, so
// that every contender does exactly the same.

// what a step does.
type what uint8

const (
	stepAlloc what = iota
	stepWrite      // a kernel writes the pattern of seed over the whole buffer
	stepRead       // a kernel compares the whole buffer with it
	stepFree
	stepSync // the host waits for the stream: it needs a number from the device
)

// step is one thing that a program does. Buffers are numbered in the order in which they are allocated.
type step struct {
	what   what
	buffer int32
	size   uint64 // bytes, of the buffer
	seed   uint64
}

// job is what one thread does.
type job struct {
	steps   []step
	buffers int
	queries int
	peak    uint64 // bytes live at once
	bytes   uint64 // allocated in all
	kernels int
}

// shape is how large a job is.
type shape struct {
	queries  int
	resident int     // columns of base tables that stay in memory for the whole job
	column   uint64  // bytes of each
	scale    float64 // of the number of rows
}

// builder writes down steps.
type builder struct {
	job
	rng  *rand.Rand
	s    shape
	live uint64
	base []buffer
}

type buffer struct {
	number     int32
	size, seed uint64
}

// table is rows and columns; a column may have a mask of which values are null, and strings have offsets and characters.
type table struct {
	rows    uint64
	columns []column
}

type column struct {
	width uint64 // bytes of a value
	parts []buffer
}

// newJob makes a job from a seed: base tables, queries, and everything freed in the end.
func newJob(seed uint64, s shape) *job {
	b := &builder{rng: rand.New(rand.NewPCG(seed, 0x9E3779B97F4A7C15)), s: s}
	for range s.resident {
		b.base = append(b.base, b.written(s.column))
	}
	b.sync()
	for range s.queries {
		b.query()
	}
	for _, x := range b.base {
		b.read(x)
		b.free(x)
	}
	b.sync()
	b.job.queries = s.queries
	return &b.job
}

func (b *builder) alloc(size uint64) buffer {
	x := buffer{int32(b.buffers), max(size, 8), b.rng.Uint64()}
	b.buffers++
	b.steps = append(b.steps, step{what: stepAlloc, buffer: x.number, size: x.size})
	b.live += x.size
	b.peak = max(b.peak, b.live)
	b.bytes += x.size
	return x
}

func (b *builder) write(x buffer) {
	b.steps = append(b.steps, step{stepWrite, x.number, x.size, x.seed})
	b.kernels++
}

func (b *builder) read(x buffer) {
	b.steps = append(b.steps, step{stepRead, x.number, x.size, x.seed})
	b.kernels++
}

func (b *builder) free(list ...buffer) {
	for _, x := range list {
		b.steps = append(b.steps, step{what: stepFree, buffer: x.number, size: x.size})
		b.live -= x.size
	}
}

func (b *builder) sync() { b.steps = append(b.steps, step{what: stepSync}) }

// written is a new buffer that a kernel has filled.
func (b *builder) written(size uint64) buffer {
	x := b.alloc(size)
	b.write(x)
	return x
}

// scalar is a number on the device; asked is one that the host waits for.
func (b *builder) scalar() buffer { return b.written(8 << b.rng.Uint64N(4)) }

func (b *builder) asked() {
	x := b.scalar()
	b.sync()
	b.free(x)
}

// between is a number from low to high, each order of magnitude as likely as the next.
func (b *builder) between(low, high uint64) uint64 {
	n := low
	for n*2 <= high && b.rng.Uint64N(100) < 80 {
		n *= 2
	}
	return min(n+b.rng.Uint64N(n), high)
}

func (b *builder) rows(low, high uint64) uint64 {
	return max(uint64(float64(b.between(low, high))*b.s.scale), 64)
}

// output makes a column of so many rows.
func (b *builder) output(rows, width uint64) column {
	c := column{width: width, parts: []buffer{b.written(rows * width)}}
	if b.rng.Uint64N(3) == 0 {
		c.parts = append(c.parts, b.written((rows+7)/8)) // which values are null
	}
	if width == 4 && b.rng.Uint64N(4) == 0 { // the values are offsets of strings
		b.asked()                                                        // how many characters
		c.parts = append(c.parts, b.written(rows*(3+b.rng.Uint64N(12)))) // the characters
	}
	return c
}

func (b *builder) drop(t table) {
	for _, c := range t.columns {
		b.free(c.parts...)
	}
}

func width(b *builder) uint64 { return []uint64{1, 4, 4, 4, 8, 8, 8, 8}[b.rng.Uint64N(8)] }

// scan decodes columns of a file, row group by row group in effect: compressed pages, their headers, a little scratch.
func (b *builder) scan(rows uint64, columns int) table {
	t := table{rows: rows}
	for range columns {
		w := width(b)
		pages := b.written(max(rows*w*3/10, 64))
		headers := b.written(64 + rows/20_000*64)
		scratch := b.alloc(256 << b.rng.Uint64N(8))
		b.read(pages)
		t.columns = append(t.columns, b.output(rows, w))
		b.free(scratch, headers, pages)
	}
	b.asked()
	return t
}

// filter keeps some rows: a mask, the count, and every column anew.
func (b *builder) filter(t table) table {
	b.read(t.columns[0].parts[0])
	mask := b.written(t.rows)
	scratch := b.alloc(1024 + t.rows/256)
	b.asked()
	b.free(scratch)
	out := table{rows: max(t.rows*(10+b.rng.Uint64N(80))/100, 1)}
	for _, c := range t.columns {
		b.read(c.parts[0])
		out.columns = append(out.columns, b.output(out.rows, c.width))
	}
	b.free(mask)
	b.drop(t)
	return out
}

// join matches two tables by a hash table over the smaller one.
func (b *builder) join(l, r table) table {
	if r.rows > l.rows {
		l, r = r, l
	}
	b.read(r.columns[0].parts[0])
	hash := b.written(r.rows * 2 * 16)
	b.asked() // how many rows the result has
	out := table{rows: max(l.rows*(20+b.rng.Uint64N(90))/100, 1)}
	b.read(hash)
	left, right := b.written(out.rows*4), b.written(out.rows*4)
	b.free(hash)
	for i, t := range []table{l, r} {
		from := []buffer{left, right}[i]
		for _, c := range t.columns[:max(len(t.columns)*2/3, 1)] {
			b.read(from)
			b.read(c.parts[0])
			out.columns = append(out.columns, b.output(out.rows, c.width))
		}
	}
	b.free(left, right)
	b.drop(l)
	b.drop(r)
	return out
}

// derive computes columns from others, with a temporary for each operator of the expression.
func (b *builder) derive(t table, n int) table {
	for range n {
		var last buffer
		for i := range 1 + b.rng.IntN(4) {
			literal := b.scalar()
			b.read(t.columns[b.rng.IntN(len(t.columns))].parts[0])
			next := b.written(t.rows * 8)
			if i > 0 {
				b.free(last)
			}
			last = next
			b.free(literal)
		}
		t.columns = append(t.columns, column{8, []buffer{last}})
	}
	return t
}

// group aggregates: a hash table over the keys, its occupied slots, a small result.
func (b *builder) group(t table) table {
	hash := b.written(t.rows * 2 * 8)
	scratch := b.alloc(512 + t.rows/64)
	b.asked()
	out := table{rows: max(t.rows/(10<<b.rng.Uint64N(8)), 1)}
	for _, c := range t.columns {
		b.read(c.parts[0])
		partial := b.written(out.rows * 8)
		out.columns = append(out.columns, b.output(out.rows, 8))
		b.free(partial)
	}
	b.free(scratch, hash)
	b.drop(t)
	return out
}

// sort orders the rows: keys and positions twice over, scratch, and every column anew.
func (b *builder) sort(t table) table {
	keys, positions := b.written(t.rows*8), b.written(t.rows*4)
	keys2, positions2 := b.alloc(t.rows*8), b.alloc(t.rows*4)
	scratch := b.alloc(4096 + t.rows/8)
	b.read(keys)
	b.read(positions)
	b.write(positions2)
	b.free(scratch, keys2, positions, keys)
	out := table{rows: t.rows}
	for _, c := range t.columns {
		b.read(positions2)
		b.read(c.parts[0])
		out.columns = append(out.columns, b.output(t.rows, c.width))
	}
	b.free(positions2)
	b.drop(t)
	return out
}

// query reads two to four tables, filters, joins, computes, aggregates and sorts, some of it twice.
func (b *builder) query() {
	var tables []table
	for range 2 + b.rng.IntN(3) {
		t := b.scan(b.rows(20_000, 8_000_000), 6+b.rng.IntN(11))
		if b.rng.IntN(4) > 0 {
			t = b.filter(t)
		}
		tables = append(tables, t)
	}
	if len(b.base) > 0 {
		b.read(b.base[b.rng.IntN(len(b.base))]) // a table that stays in memory is looked at
	}
	for len(tables) > 1 {
		t := b.join(tables[0], tables[1])
		tables = append(slices.Clone(tables[2:]), t)
	}
	t := b.derive(tables[0], 1+b.rng.IntN(6))
	if b.rng.IntN(2) == 0 {
		t = b.filter(t)
	}
	if b.rng.IntN(3) == 0 {
		t = b.sort(t)
	}
	t = b.sort(b.group(t))
	for _, c := range t.columns { // the result goes to the host
		b.read(c.parts[0])
	}
	b.sync()
	b.drop(t)
}
