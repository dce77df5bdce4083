package export

import (
	"fmt"
	"io"
)

// WriteRecords writes rows that another package made as Parquet, as WriteParquet writes those of a run. Cells are in the order of
// the table's columns: int64, uint64, string, bool, or nil for null. about is kept in the file under keys of its own.
func WriteRecords(w io.Writer, table *Table, about map[string]string, records [][]any) error {
	texts := &words{ids: map[string]uint32{}}
	for _, record := range records {
		for _, cell := range record {
			if s, ok := cell.(string); ok {
				texts.id(s)
			}
		}
	}
	p := newParquet(w, about, table)
	p.speak(texts)
	for _, record := range records {
		if err := writeRecord(p, table, texts, record); err != nil {
			return err
		}
	}
	return p.close()
}

func writeRecord(r rows, table *Table, texts *words, record []any) error {
	if len(record) != len(table.Columns) {
		return fmt.Errorf("a row of table %s has %d cells; expected %d", table.Name, len(record), len(table.Columns))
	}
	for i, cell := range record {
		column := &table.Columns[i]
		fits := false
		switch v := cell.(type) {
		case nil:
			if fits = column.Null; fits {
				r.null()
			}
		case int64:
			if fits = column.Type == Int; fits {
				r.int(v)
			}
		case uint64:
			if fits = column.Type == Uint; fits {
				r.uint(v)
			}
		case string:
			if fits = column.Type == Text; fits {
				r.text(texts.ids[v])
			}
		case bool:
			if fits = column.Type == Truth; fits {
				r.truth(v)
			}
		}
		if !fits {
			return fmt.Errorf("column %s of table %s is %s; got %T", column.Name, table.Name, column.Type, cell)
		}
	}
	return r.end()
}
