package export

import (
	"bufio"
	"encoding/binary"
	"io"
	"math/bits"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/cistern-gpu/cistern/trace"
)

// Parquet, written here rather than by a library: flat tables of four types need little of the format, libraries for
// all of it would double the size of the command, and texts are known by number, which is what a dictionary wants. The
// format is described in parquet-format's README.md, Encodings.md and parquet.thrift.
//
// A group of rows is held in memory until it is full; then each column becomes one page, zstd: texts as indices into a
// dictionary page before it, signed numbers as differences, all else plain.

const (
	parquetMagic = "PAR1"
	groupRows    = 131_072

	// Enumerations of parquet.thrift.
	parquetBoolean   = 0
	parquetInt64     = 2
	parquetByteArray = 6

	parquetRequired = 0
	parquetOptional = 1

	parquetUTF8  = 0 // converted types
	parquetUint  = 14
	parquetInt   = 18
	parquetPlain = 0 // encodings
	parquetRLE   = 3
	parquetDelta = 5
	parquetDict  = 8
	parquetZstd  = 6

	parquetDataPage       = 0
	parquetDictionaryPage = 2
)

// parquetRows writes rows as a Parquet file.
type parquetRows struct {
	w       *bufio.Writer
	offset  int64
	table   *Table
	meta    [][2]string
	columns []parquetColumn
	next    int // column of the next cell
	rows    int // in the group
	total   int64
	words   *words
	local   []uint32 // index in the dictionary of the page by word, +1
	groups  []parquetGroup
	zstd    *zstd.Encoder
	page    []byte // reused
	packed  []byte
}

// parquetColumn is a column of the group that is being filled: the values that are not null, and which rows have one.
type parquetColumn struct {
	values []uint64
	valid  []bool // of columns that may be null
}

// parquetGroup is what the file's end says of a group of rows.
type parquetGroup struct {
	rows   int
	chunks []parquetChunk
}

type parquetChunk struct {
	dictionary, data     int64 // offsets; no dictionary is 0
	compressed, unpacked int64
	nulls                int
	low, high            uint64
	bounds               bool // low and high are known
}

func newParquet(w io.Writer, f *trace.File, table *Table) *parquetRows {
	// One goroutine: the output is to be the same on every machine, and converting is not what a machine is there for.
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		panic(err) // the options are constant
	}
	p := &parquetRows{w: bufio.NewWriterSize(w, 1<<16), table: table, zstd: z,
		columns: make([]parquetColumn, len(table.Columns))}
	p.meta = [][2]string{{"cistern.path", f.Path}, {"cistern.format", f.Format}, {"cistern.table", table.Name}}
	for _, t := range f.Traces {
		if t.Settings.Conf != "" {
			p.meta = append(p.meta, [2]string{"cistern.conf", t.Settings.Conf})
			break
		}
	}
	var notes []string
	for _, t := range f.Traces {
		notes = append(notes, t.Notes...)
	}
	if len(notes) > 0 {
		p.meta = append(p.meta, [2]string{"cistern.notes", strings.Join(notes, "\n")})
	}
	p.write([]byte(parquetMagic))
	return p
}

// write appends to the file. The writer remembers what failed; end and close tell.
func (p *parquetRows) write(b []byte) {
	_, _ = p.w.Write(b)
	p.offset += int64(len(b))
}

func (p *parquetRows) speak(w *words) {
	p.flush() // the words of the group so far are others
	p.words = w
	p.local = make([]uint32, len(w.list))
}

func (p *parquetRows) uint(v uint64) {
	c := &p.columns[p.next]
	c.values = append(c.values, v)
	if p.table.Columns[p.next].Null {
		c.valid = append(c.valid, true)
	}
	p.next++
}

func (p *parquetRows) int(v int64)    { p.uint(uint64(v)) }
func (p *parquetRows) text(id uint32) { p.uint(uint64(id)) }

func (p *parquetRows) truth(v bool) {
	if v {
		p.uint(1)
	} else {
		p.uint(0)
	}
}

func (p *parquetRows) null() {
	p.columns[p.next].valid = append(p.columns[p.next].valid, false)
	p.next++
}

func (p *parquetRows) end() error {
	p.next = 0
	if p.rows++; p.rows < groupRows {
		return nil
	}
	p.flush()
	_, err := p.w.Write(nil)
	return err
}

// flush writes the group of rows.
func (p *parquetRows) flush() {
	if p.rows == 0 {
		return
	}
	g := parquetGroup{rows: p.rows}
	for i := range p.columns {
		g.chunks = append(g.chunks, p.chunk(i))
	}
	p.groups = append(p.groups, g)
	p.total += int64(p.rows)
	p.rows = 0
}

// chunk writes the pages of one column and empties it.
func (p *parquetRows) chunk(i int) parquetChunk {
	col, c := &p.table.Columns[i], &p.columns[i]
	k := parquetChunk{nulls: p.rows - len(c.values)}
	page := p.page[:0]
	if col.Null {
		page = append(page, 0, 0, 0, 0)
		page = appendHybrid(page, 1, len(c.valid), func(i int) uint64 {
			if c.valid[i] {
				return 1
			}
			return 0
		})
		binary.LittleEndian.PutUint32(page, uint32(len(page)-4))
	}
	encoding := int32(parquetPlain)
	switch col.Type {
	case Text:
		encoding = parquetDict
		entries := p.dictionary(c.values, &k)
		width := max(1, bits.Len(uint(max(0, entries-1))))
		page = append(page, byte(width))
		page = appendHybrid(page, width, len(c.values), func(i int) uint64 { return c.values[i] })
	case Truth:
		page = appendPacked(page, 1, len(c.values), func(i int) uint64 { return c.values[i] })
	case Int:
		encoding = parquetDelta
		page = appendDelta(page, c.values)
		k.bound(c.values, func(a, b uint64) bool { return int64(a) < int64(b) })
	default:
		for _, v := range c.values {
			page = binary.LittleEndian.AppendUint64(page, v)
		}
		k.bound(c.values, func(a, b uint64) bool { return a < b })
	}
	p.page = page
	k.data = p.offset
	p.emit(page, &k, func(h *thrift) {
		h.i32(1, parquetDataPage)
	}, func(h *thrift) {
		h.structure(5)
		h.i32(1, int32(p.rows))
		h.i32(2, encoding)
		h.i32(3, parquetRLE)
		h.i32(4, parquetRLE)
		h.end()
	})
	c.values, c.valid = c.values[:0], c.valid[:0]
	return k
}

// dictionary writes the page of the words that the column has, numbered as they come, and replaces the words by their
// numbers there.
func (p *parquetRows) dictionary(values []uint64, k *parquetChunk) int {
	var page []byte
	n := uint32(0)
	var used []uint64
	for i, id := range values {
		if p.local[id] == 0 {
			n++
			p.local[id] = n
			used = append(used, id)
			s := p.words.list[id]
			page = append(binary.LittleEndian.AppendUint32(page, uint32(len(s))), s...)
		}
		values[i] = uint64(p.local[id] - 1)
	}
	for _, id := range used {
		p.local[id] = 0
	}
	k.dictionary = p.offset
	p.emit(page, k, func(h *thrift) {
		h.i32(1, parquetDictionaryPage)
	}, func(h *thrift) {
		h.structure(7)
		h.i32(1, int32(n))
		h.i32(2, parquetPlain)
		h.end()
	})
	return int(n)
}

// emit writes a page: what kind it is, its sizes, what else its header says, and itself.
func (p *parquetRows) emit(page []byte, k *parquetChunk, kind, rest func(*thrift)) {
	p.packed = p.zstd.EncodeAll(page, p.packed[:0])
	var h thrift
	h.begin()
	kind(&h)
	h.i32(2, int32(len(page)))
	h.i32(3, int32(len(p.packed)))
	rest(&h)
	h.end()
	p.write(h.b)
	p.write(p.packed)
	k.compressed += int64(len(h.b) + len(p.packed))
	k.unpacked += int64(len(h.b) + len(page))
}

func (k *parquetChunk) bound(values []uint64, less func(a, b uint64) bool) {
	for i, v := range values {
		if i == 0 || less(v, k.low) {
			k.low = v
		}
		if i == 0 || less(k.high, v) {
			k.high = v
		}
	}
	k.bounds = len(values) > 0
}

func (p *parquetRows) close() error {
	p.flush()
	var t thrift
	t.begin()
	p.footer(&t)
	t.end()
	p.write(t.b)
	p.write(binary.LittleEndian.AppendUint32(nil, uint32(len(t.b))))
	p.write([]byte(parquetMagic))
	return p.w.Flush()
}

// footer is FileMetaData.
func (p *parquetRows) footer(t *thrift) {
	t.i32(1, 1) // version
	t.list(2, thriftStruct, 1+len(p.table.Columns))
	t.begin()
	t.text(4, p.table.Name)
	t.i32(5, int32(len(p.table.Columns)))
	t.end()
	for i := range p.table.Columns {
		p.schema(t, &p.table.Columns[i])
	}
	t.i64(3, p.total)
	t.list(4, thriftStruct, len(p.groups))
	for i := range p.groups {
		p.group(t, i)
	}
	t.list(5, thriftStruct, len(p.meta))
	for _, m := range p.meta {
		t.begin()
		t.text(1, m[0])
		t.text(2, m[1])
		t.end()
	}
	t.text(6, "cistern")
	// The bounds in the statistics are in each type's own order.
	t.list(7, thriftStruct, len(p.table.Columns))
	for range p.table.Columns {
		t.begin()
		t.structure(1)
		t.end()
		t.end()
	}
}

func physical(t Type) int32 {
	switch t {
	case Text:
		return parquetByteArray
	case Truth:
		return parquetBoolean
	}
	return parquetInt64
}

func (p *parquetRows) schema(t *thrift, c *Column) {
	t.begin()
	t.i32(1, physical(c.Type))
	if c.Null {
		t.i32(3, parquetOptional)
	} else {
		t.i32(3, parquetRequired)
	}
	t.text(4, c.Name)
	switch c.Type {
	case Text:
		t.i32(6, parquetUTF8)
		t.structure(10)
		t.structure(1) // STRING
		t.end()
		t.end()
	case Int, Uint:
		if c.Type == Int {
			t.i32(6, parquetInt)
		} else {
			t.i32(6, parquetUint)
		}
		t.structure(10)
		t.structure(10) // INTEGER
		t.i8(1, 64)
		t.truth(2, c.Type == Int)
		t.end()
		t.end()
	}
	t.end()
}

func (p *parquetRows) group(t *thrift, n int) {
	g := &p.groups[n]
	var unpacked, compressed int64
	t.begin()
	t.list(1, thriftStruct, len(g.chunks))
	for i := range g.chunks {
		k := &g.chunks[i]
		unpacked += k.unpacked
		compressed += k.compressed
		p.columnChunk(t, &p.table.Columns[i], k, g.rows)
	}
	t.i64(2, unpacked)
	t.i64(3, int64(g.rows))
	t.i64(6, compressed)
	t.end()
}

func (p *parquetRows) columnChunk(t *thrift, c *Column, k *parquetChunk, rows int) {
	t.begin()
	t.i64(2, 0) // nothing of it is elsewhere
	t.structure(3)
	t.i32(1, physical(c.Type))
	encodings := []int64{parquetPlain, parquetRLE}
	switch c.Type {
	case Text:
		encodings = append(encodings, parquetDict)
	case Int:
		encodings = []int64{parquetRLE, parquetDelta}
	}
	t.list(2, thriftI32, len(encodings))
	for _, e := range encodings {
		t.b = binary.AppendVarint(t.b, e)
	}
	t.list(3, thriftBinary, 1)
	t.element(c.Name)
	t.i32(4, parquetZstd)
	t.i64(5, int64(rows))
	t.i64(6, k.unpacked)
	t.i64(7, k.compressed)
	t.i64(9, k.data)
	if c.Type == Text {
		t.i64(11, k.dictionary)
	}
	t.structure(12)
	t.i64(3, int64(k.nulls))
	if k.bounds {
		t.bytes(5, binary.LittleEndian.AppendUint64(nil, k.high))
		t.bytes(6, binary.LittleEndian.AppendUint64(nil, k.low))
	}
	t.end()
	t.end()
	t.end()
}
