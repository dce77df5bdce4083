package export

import (
	"bytes"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"

	"github.com/cistern-gpu/cistern/recording"
)

func writeFile(t testing.TB, name string, b []byte) {
	t.Helper()
	if err := os.WriteFile(name, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// What the library reads is what was written, whatever it is: numbers of all widths, nulls none, some and all, one word
// and thousands, one row and several groups.
func TestParquetReadBack(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 1))
	columns := []Column{{"i", Int, false, ""}, {"in", Int, true, ""}, {"u", Uint, false, ""}, {"un", Uint, true, ""},
		{"s", Text, false, ""}, {"sn", Text, true, ""}, {"b", Truth, false, ""}, {"bn", Truth, true, ""}}
	for _, n := range []int{0, 1, 2, 7, 8, 9, 31, 32, 33, 127, 128, 129, 130, 257, 5000, groupRows, groupRows + 1} {
		for _, nulls := range []float64{0, 0.3, 1} {
			if n >= groupRows && (nulls != 0.3 || testing.Short() && n > groupRows) {
				continue // a second each
			}
			distinct := 1 + rng.IntN(max(1, n))
			w := &words{ids: map[string]uint32{}}
			for i := range distinct {
				w.id(strings.Repeat(`é,"`, i%5) + string(rune('a'+i%26)) + strings.Repeat("x", i/26%40))
			}
			table := &Table{Name: "random", Columns: columns, fill: func(r rows, _ *recording.Trace, _ clock, w *words) error {
				rng := rand.New(rand.NewPCG(uint64(n), 2))
				width := rng.IntN(65)
				for range n {
					v := rng.Uint64() >> (64 - width)
					if rng.IntN(50) == 0 {
						v = []uint64{0, math.MaxUint64, math.MaxInt64, 1 << 63}[rng.IntN(4)]
					}
					for _, c := range columns {
						switch {
						case c.Null && rng.Float64() < nulls:
							r.null()
						case c.Type == Int:
							r.int(int64(v))
						case c.Type == Uint:
							r.uint(v)
						case c.Type == Text:
							r.text(uint32(rng.IntN(len(w.list))))
						default:
							r.truth(rng.IntN(2) == 0)
						}
					}
					if err := r.end(); err != nil {
						return err
					}
				}
				return nil
			}}
			fill := func(r rows) []byte {
				r.speak(w)
				if err := table.fill(r, nil, clock{}, w); err != nil {
					t.Fatal(err)
				}
				if err := r.close(); err != nil {
					t.Fatal(err)
				}
				return nil
			}
			var text, packed bytes.Buffer
			fill(newCSV(&text, columns))
			fill(newParquet(&packed, aboutFile(&recording.File{}), table))
			got, groups := parquetText(t, packed.Bytes())
			if got != text.String() {
				t.Fatalf("%d rows, %g nulls: %s", n, nulls, firstDifference(got, text.String()))
			}
			if want := (n + groupRows - 1) / groupRows; groups != want {
				t.Errorf("%d rows are %d groups, want %d", n, groups, want)
			}
		}
	}
}

// What the end of the file says of it is true: types, bounds, counts, what it came from.
func TestParquetFooter(t *testing.T) {
	f := sampleRun()
	b := written(t, func(b *bytes.Buffer) error { return WriteParquet(b, f, Tables[0]) })
	file, err := parquet.OpenFile(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(len(f.Traces[0].Events) + len(f.Traces[1].Events)); file.NumRows() != want {
		t.Errorf("%d rows, want %d", file.NumRows(), want)
	}
	for key, want := range map[string]string{"cistern.path": "run.pickle", "cistern.format": "pytorch-snapshot", "cistern.table": "events",
		"cistern.conf": "expandable_segments:True", "cistern.notes": "recording began mid-run"} {
		if got, _ := file.Lookup(key); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	types := map[string]string{"event": "INT(64,true)", "bytes": "INT(64,false)", "kind": "STRING"}
	for i, c := range file.Schema().Fields() {
		if want, ok := types[c.Name()]; ok && c.Type().String() != want {
			t.Errorf("%s has type %s, want %s", c.Name(), c.Type(), want)
		}
		if c.Optional() != Tables[0].Columns[i].Null {
			t.Errorf("%s: optional is %v", c.Name(), c.Optional())
		}
	}
	for i, g := range file.Metadata().RowGroups {
		for _, c := range g.Columns {
			m := c.MetaData
			if m.PathInSchema[0] != "event" {
				continue
			}
			if lo, hi := m.Statistics.MinValue, m.Statistics.MaxValue; lo[0] != 0 || int(hi[0]) != len(f.Traces[i].Events)-1 {
				t.Errorf("group %d: events are %v to %v", i, lo, hi)
			}
		}
	}
}
