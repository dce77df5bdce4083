package export

import (
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/parquet-go/parquet-go"

	"github.com/cistern-gpu/cistern/recording"
)

const (
	groupRows = 131_072
	batchRows = 256 // rows that are handed to the library at a time
)

// parquetRows writes rows as a Parquet file: texts by a dictionary, signed numbers as differences, zstd.
type parquetRows struct {
	w       *parquet.GenericWriter[any]
	columns []Column
	texts   []parquet.Value
	batch   []parquet.Row
	values  []parquet.Value // of the batch's rows
	next    int             // column of the next cell
	err     error
}

func newParquet(w io.Writer, about map[string]string, table *Table) *parquetRows {
	options := []parquet.WriterOption{parquet.Compression(&parquet.Zstd), parquet.MaxRowsPerRowGroup(groupRows),
		parquet.KeyValueMetadata("cistern.table", table.Name), parquetSchema(table)}
	for _, key := range slices.Sorted(maps.Keys(about)) {
		options = append(options, parquet.KeyValueMetadata(key, about[key]))
	}
	return &parquetRows{w: parquet.NewGenericWriter[any](w, options...), columns: table.Columns,
		values: make([]parquet.Value, 0, batchRows*len(table.Columns))}
}

// aboutFile is what a file's footer says of the recording that it was made of.
func aboutFile(f *recording.File) map[string]string {
	about := map[string]string{"cistern.path": f.Path, "cistern.format": f.Format}
	for _, t := range f.Traces {
		if t.Settings.Conf != "" {
			about["cistern.conf"] = t.Settings.Conf
			break
		}
	}
	var notes []string
	for _, t := range f.Traces {
		notes = append(notes, t.Notes...)
	}
	if len(notes) > 0 {
		about["cistern.notes"] = strings.Join(notes, "\n")
	}
	return about
}

func parquetSchema(table *Table) *parquet.Schema {
	var s orderedGroup
	for _, c := range table.Columns {
		n := parquetNode(c.Type)
		if c.Null {
			n = parquet.Optional(n)
		}
		s.fields = append(s.fields, parquetField{n, c.Name})
	}
	return parquet.NewSchema(table.Name, &s)
}

func parquetNode(t Type) parquet.Node {
	switch t {
	case Text:
		return parquet.Encoded(parquet.String(), &parquet.RLEDictionary)
	case Truth:
		return parquet.Leaf(parquet.BooleanType)
	case Int:
		return parquet.Encoded(parquet.Int(64), &parquet.DeltaBinaryPacked)
	}
	return parquet.Uint(64)
}

// orderedGroup is the columns of a table in their order; those of parquet.Group are in the order of their names.
type orderedGroup struct {
	parquet.Group
	fields []parquet.Field
}

func (g *orderedGroup) Fields() []parquet.Field { return g.fields }

type parquetField struct {
	parquet.Node
	name string
}

func (f parquetField) Name() string { return f.name }

// Value is for rows that are Go structures, which these are not.
func (f parquetField) Value(reflect.Value) reflect.Value { return reflect.Value{} }

// speak begins a group of rows, so that each device has groups of its own.
func (p *parquetRows) speak(w *words) {
	p.flush()
	p.texts = make([]parquet.Value, len(w.list))
	for i, s := range w.list {
		p.texts[i] = parquet.ByteArrayValue([]byte(s))
	}
}

func (p *parquetRows) cell(v parquet.Value) {
	defined := 0
	if p.columns[p.next].Null {
		defined = 1
	}
	p.values = append(p.values, v.Level(0, defined, p.next))
	p.next++
}

func (p *parquetRows) int(v int64)    { p.cell(parquet.Int64Value(v)) }
func (p *parquetRows) uint(v uint64)  { p.cell(parquet.Int64Value(int64(v))) }
func (p *parquetRows) text(id uint32) { p.cell(p.texts[id]) }
func (p *parquetRows) truth(v bool)   { p.cell(parquet.BooleanValue(v)) }

func (p *parquetRows) null() {
	p.values = append(p.values, parquet.NullValue().Level(0, 0, p.next))
	p.next++
}

func (p *parquetRows) end() error {
	p.batch = append(p.batch, p.values[len(p.values)-p.next:])
	p.next = 0
	if len(p.batch) == batchRows {
		p.write()
	}
	return p.err
}

// write hands the batch to the library, flush ends the group of rows as well. What failed first stays.
func (p *parquetRows) write() {
	if p.err == nil && len(p.batch) > 0 {
		_, p.err = p.w.WriteRows(p.batch)
	}
	p.batch, p.values = p.batch[:0], p.values[:0]
}

func (p *parquetRows) flush() {
	if p.write(); p.err == nil {
		p.err = p.w.Flush()
	}
}

func (p *parquetRows) close() error {
	if p.flush(); p.err != nil {
		return p.err
	}
	return p.w.Close()
}
