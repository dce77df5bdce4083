package export

import "encoding/binary"

// thrift writes the compact protocol of Apache Thrift, as far as Parquet's headers need it: structures whose fields
// come in rising order.
type thrift struct {
	b    []byte
	last []int16 // the last field of each open structure
}

// Types of the compact protocol.
const (
	thriftTrue   = 1
	thriftFalse  = 2
	thriftByte   = 3
	thriftI32    = 5
	thriftI64    = 6
	thriftBinary = 8
	thriftList   = 9
	thriftStruct = 12
)

// begin opens a structure that is an element of a list, or the outermost one.
func (t *thrift) begin() { t.last = append(t.last, 0) }

// end closes the structure that was opened last.
func (t *thrift) end() {
	t.b = append(t.b, 0)
	t.last = t.last[:len(t.last)-1]
}

func (t *thrift) field(id int16, kind byte) {
	last := &t.last[len(t.last)-1]
	if d := id - *last; d > 0 && d <= 15 {
		t.b = append(t.b, byte(d)<<4|kind)
	} else {
		t.b = binary.AppendVarint(append(t.b, kind), int64(id))
	}
	*last = id
}

func (t *thrift) structure(id int16) {
	t.field(id, thriftStruct)
	t.begin()
}

func (t *thrift) i32(id int16, v int32) {
	t.field(id, thriftI32)
	t.b = binary.AppendVarint(t.b, int64(v))
}

func (t *thrift) i64(id int16, v int64) {
	t.field(id, thriftI64)
	t.b = binary.AppendVarint(t.b, v)
}

func (t *thrift) i8(id int16, v int8) { t.field(id, thriftByte); t.b = append(t.b, byte(v)) }

func (t *thrift) truth(id int16, v bool) {
	if v {
		t.field(id, thriftTrue)
	} else {
		t.field(id, thriftFalse)
	}
}

func (t *thrift) bytes(id int16, v []byte) {
	t.field(id, thriftBinary)
	t.b = append(binary.AppendUvarint(t.b, uint64(len(v))), v...)
}

func (t *thrift) text(id int16, s string) {
	t.field(id, thriftBinary)
	t.element(s)
}

// element appends a text to a list.
func (t *thrift) element(s string) { t.b = append(binary.AppendUvarint(t.b, uint64(len(s))), s...) }

// list opens a list of n elements, which are appended one by one.
func (t *thrift) list(id int16, kind byte, n int) {
	t.field(id, thriftList)
	if n < 15 {
		t.b = append(t.b, byte(n)<<4|kind)
	} else {
		t.b = binary.AppendUvarint(append(t.b, 0xf0|kind), uint64(n))
	}
}
