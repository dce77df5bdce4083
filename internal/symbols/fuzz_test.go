package symbols

import (
	"bytes"
	"encoding/binary"
	"io"
	"testing"
)

// object is a library with one segment and two functions, as small as one can be.
func object() []byte {
	const base, text, symbols, names, sections = 0, 120, 128, 200, 216
	b := make([]byte, sections+4*64)
	le := binary.LittleEndian
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 3)  // a shared object
	le.PutUint16(b[18:], 62) // x86-64
	le.PutUint32(b[20:], 1)
	le.PutUint64(b[32:], 64)
	le.PutUint64(b[40:], sections)
	for at, v := range map[int]uint16{52: 64, 54: 56, 56: 1, 58: 64, 60: 4, 62: 3} {
		le.PutUint16(b[at:], v)
	}
	le.PutUint32(b[64:], 1) // to be loaded
	le.PutUint32(b[68:], 5)
	le.PutUint64(b[96:], uint64(len(b)))
	le.PutUint64(b[104:], uint64(len(b)))
	for i, from := range []uint64{base + text, base + text + 4} {
		s := b[symbols+24*(i+1):]
		le.PutUint32(s, uint32(1+2*i))
		s[4] = 0x12 // a global function
		le.PutUint16(s[6:], 1)
		le.PutUint64(s[8:], from)
		le.PutUint64(s[16:], 4)
	}
	copy(b[names:], "\x00f\x00g\x00")
	section := func(i int, typ, link uint32, at, size, entry uint64) {
		s := b[sections+64*i:]
		le.PutUint32(s[4:], typ)
		le.PutUint64(s[24:], at)
		le.PutUint64(s[32:], size)
		le.PutUint32(s[40:], link)
		le.PutUint64(s[56:], entry)
	}
	section(1, 1, 0, text, 8, 0)
	section(2, 2, 3, symbols, 72, 24)
	section(3, 3, 0, names, 8, 0)
	return b
}

// FuzzFile: whatever a file says of itself, it is read through, and every address has some name.
func FuzzFile(f *testing.F) {
	f.Add(object(), uint64(121), uint64(125))
	f.Add(object()[:300], uint64(121), uint64(1<<63))
	f.Fuzz(func(t *testing.T, b []byte, first, second uint64) {
		parsed, err := parse(bytes.NewReader(b))
		if err != nil {
			return
		}
		o := file{parsed, io.NopCloser(nil)}
		all := o.functions()
		tables := Tables{files: map[string]*functions{"x": all}}
		names := [2]string{"one", "two"}
		o.nameAll([]wanted{{offset: first, to: &names[0]}, {offset: second, to: &names[1]}})
		for i, at := range []uint64{first, second} {
			if tables.Name("x", at) == "" || names[i] == "" {
				t.Errorf("%#x has no name", at)
			}
		}
	})
}

func TestObject(t *testing.T) {
	parsed, err := parse(bytes.NewReader(object()))
	if err != nil {
		t.Fatal(err)
	}
	o := file{parsed, io.NopCloser(nil)}
	tables := Tables{files: map[string]*functions{"x": o.functions()}}
	names := [2]string{"one", "two"}
	o.nameAll([]wanted{{offset: 121, to: &names[0]}, {offset: 127, to: &names[1]}})
	if names != [2]string{"f", "g"} || tables.Name("x", 121) != "f" || tables.Name("x", 127) != "g" || tables.Name("x", 128) != "x+0x80" {
		t.Errorf("%q, %s %s %s", names, tables.Name("x", 121), tables.Name("x", 127), tables.Name("x", 128))
	}
}
