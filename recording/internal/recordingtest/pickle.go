package recordingtest

import (
	"encoding/binary"
	"fmt"
)

// Opcodes of pickles, as in package pytorch.
const (
	proto           = 0x80
	long1           = 0x8a
	shortBinunicode = 0x8c
)

// Pickle strings together a pickle: bytes and opcodes as they are, strings as SHORT_BINUNICODE, integers as LONG1.
func Pickle(parts ...any) []byte {
	b := []byte{proto, 4}
	for _, p := range parts {
		switch p := p.(type) {
		case byte:
			b = append(b, p)
		case rune:
			b = append(b, byte(p))
		case []byte:
			b = append(b, p...)
		case string:
			b = append(append(b, shortBinunicode, byte(len(p))), p...)
		case int:
			b = binary.LittleEndian.AppendUint64(append(b, long1, 8), uint64(p))
		default:
			panic(fmt.Sprintf("%T", p))
		}
	}
	return b
}

// Entry is one trace entry.
func Entry(action string, addr, size int) []byte {
	return Pickle('}', '(', "action", action, "addr", addr, "size", size, "stream", 0, "time_us", 5, 'u')[2:]
}

// Around makes a snapshot of one device around the inside of its list.
func Around(inside []byte) []byte {
	return Pickle('}', '(', "segments", ']', "device_traces", ']', '(', ']', '(', inside, 'e', 'e', 'u', '.')
}

// U32 and U64 are operands of opcodes.
func U32(n uint32) []byte { return binary.LittleEndian.AppendUint32(nil, n) }
func U64(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }
