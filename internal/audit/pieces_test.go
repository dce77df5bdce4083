package audit

import (
	"strings"
	"testing"
	"unsafe"
)

// pieces are the records of something long.
func pieces(pid uint32, typ uint8, number uint64, text string) []Record {
	var out []Record
	for at := 0; at < len(text); at += MaxPayload {
		r := Record{PID: pid, Type: typ, Addr: number, Handle: uint64(len(text)), Extra: uint64(at)}
		r.Count = uint16(copy((*[MaxPayload]byte)(unsafe.Pointer(&r.payload))[:], text[at:]))
		out = append(out, r)
	}
	return out
}

// TestPieces: what goes through several records is whole with the last of them, whichever thread sends the same or other
// things meanwhile, and whatever was dropped before.
func TestPieces(t *testing.T) {
	long := strings.Repeat("/folder", 60) + "\x00function"
	a, b := pieces(1, RecordCode, 7, long), pieces(1, RecordCode, 7, long)
	other, child := pieces(1, RecordCode, 8, "f\x00g"), pieces(2, RecordCode, 7, long)
	last := len(a) - 1
	for name, c := range map[string]struct {
		records []Record
		whole   int
	}{
		"in order":                      {a, 1},
		"by two threads":                {[]Record{a[0], b[0], b[1], a[1], a[2], b[2]}, 1},
		"of two processes":              {append(append([]Record{}, a[:last]...), child[:last]...), 0},
		"with another between":          {[]Record{a[0], other[0], a[1], a[2]}, 2},
		"the first was dropped":         {a[1:], 0},
		"one was dropped, and it again": {append([]Record{a[0], a[2]}, b...), 1},
	} {
		if len(a) != 3 {
			t.Fatalf("%d pieces", len(a))
		}
		var p Pieces
		whole := 0
		for i := range c.records {
			w := p.Add(&c.records[i])
			if w == nil {
				continue
			}
			whole++
			if file, function := w.Names(); file+"\x00"+function != long && file+function != "fg" {
				t.Errorf("%s: %q, %q", name, file, function)
			}
		}
		if want := c.whole; whole != want {
			t.Errorf("%s: whole %d times, want %d", name, whole, want)
		}
	}
	var p Pieces
	for i := range uint64(10 * mostBegun) {
		p.Add(&Record{Type: RecordStack, Addr: i, Handle: 40, Count: 18})
		if len(p.begun) > mostBegun {
			t.Fatalf("%d begun are kept", len(p.begun))
		}
	}
	// One that never ends is not kept either.
	for i := range uint64(10 * mostWhole) {
		p.Add(&Record{Type: RecordStack, Addr: 1, Handle: 1 << 62, Extra: i * 18, Count: 18})
		for k, w := range p.begun {
			if len(w.Words) > 2*mostWhole {
				t.Fatalf("%d words of %v are kept", len(w.Words), k)
			}
		}
	}
	w := p.Add(&Record{Type: RecordStack, Addr: 1 << 40, Handle: 2, Count: 2})
	if w == nil || len(w.Words) != 2 {
		t.Errorf("a stack in one record: %+v", w)
	}
}
