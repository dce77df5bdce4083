package export

import (
	"bytes"
	"encoding/csv"
	"slices"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/cistern-gpu/cistern/recording"
)

// The table of stacks is that of allocations, added up by stack, and the same in Parquet.
func TestStacksAddUpAllocations(t *testing.T) {
	recorded(t, func(t *testing.T, f *recording.File) {
		read := func(table *Table) ([][]string, func(string) int) {
			text := written(t, func(b *bytes.Buffer) error { return WriteCSV(b, f, table) })
			rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
			if err != nil {
				t.Fatal(err)
			}
			if table == ByStack {
				packed, _ := parquetText(t, written(t, func(b *bytes.Buffer) error { return WriteParquet(b, f, table) }))
				if packed != string(text) {
					t.Errorf("Parquet and CSV differ: %s", firstDifference(packed, string(text)))
				}
			}
			return rows[1:], func(name string) int { return slices.Index(rows[0], name) }
		}
		rows, col := read(Tables[1])
		want, got := map[string][6]int64{}, map[string][6]int64{}
		for _, row := range rows {
			n, err := strconv.ParseInt(row[col("bytes")], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			key := row[col("device")] + " " + row[col("stack_id")]
			u := want[key]
			for i, counts := range []bool{row[col("alloc_event")] != "", row[col("at_peak")] == "true", row[col("at_end")] == "true"} {
				if counts {
					u[2*i]++
					u[2*i+1] += n
				}
			}
			want[key] = u
		}
		for key, u := range want {
			if u == ([6]int64{}) { // freed before the peak, allocated before the first event
				delete(want, key)
			}
		}
		rows, col = read(ByStack)
		for _, row := range rows {
			var u [6]int64
			for i, name := range []string{"allocs", "alloc_bytes", "peak_blocks", "peak_bytes", "end_blocks", "end_bytes"} {
				u[i], _ = strconv.ParseInt(row[col(name)], 10, 64)
			}
			key := row[col("device")] + " " + row[col("stack_id")]
			if _, twice := got[key]; twice {
				t.Errorf("device and stack %s are there twice", key)
			}
			got[key] = u
		}
		if d := gocmp.Diff(want, got); d != "" {
			t.Errorf("(-allocations +stacks):\n%s", d)
		}
	})
}

// Cells have to fit their columns.
func TestRecords(t *testing.T) {
	table := &Table{Name: "t", Columns: []Column{{"i", Int, true, ""}, {"u", Uint, false, ""}, {"s", Text, false, ""}, {"b", Truth, false, ""}}}
	good := [][]any{{int64(-1), uint64(1) << 63, "a", true}, {nil, uint64(0), "", false}}
	b := written(t, func(b *bytes.Buffer) error { return WriteRecords(b, table, map[string]string{"k": "v"}, good) })
	if text, _ := parquetText(t, b); text != "i,u,s,b\n-1,9223372036854775808,a,true\n,0,,false\n" {
		t.Errorf("%q", text)
	}
	for _, c := range []struct {
		row  []any
		want string
	}{
		{[]any{int64(1)}, "has 1 cells; expected 4"},
		{[]any{int64(1), nil, "", true}, "column u of table t is UBIGINT; got <nil>"},
		{[]any{uint64(1), uint64(1), "", true}, "column i of table t is BIGINT; got uint64"},
		{[]any{int64(1), uint64(1), true, true}, "column s of table t is VARCHAR; got bool"},
		{[]any{int64(1), uint64(1), "", 1}, "column b of table t is BOOLEAN; got int"},
	} {
		if err := WriteRecords(&bytes.Buffer{}, table, nil, [][]any{c.row}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %q", c.row, err, c.want)
		}
	}
}

// Each row of a table with one more column ends with its text.
func TestWith(t *testing.T) {
	f := sampleRun()
	for _, table := range Tables[:3] {
		bare := written(t, func(b *bytes.Buffer) error { return WriteCSV(b, f, table) })
		more := table.With(Column{Name: "more", Type: Text}, "m")
		text := written(t, func(b *bytes.Buffer) error { return WriteCSV(b, f, more) })
		want := strings.ReplaceAll(strings.Replace(string(bare), "\n", ",more\x00", 1), "\n", ",m\n")
		if want = strings.Replace(want, "\x00", "\n", 1); string(text) != want {
			t.Errorf("%s: %s", table.Name, firstDifference(string(text), want))
		}
		if packed, _ := parquetText(t, written(t, func(b *bytes.Buffer) error { return WriteParquet(b, f, more) })); packed != want {
			t.Errorf("%s: %s", table.Name, firstDifference(packed, want))
		}
	}
}
