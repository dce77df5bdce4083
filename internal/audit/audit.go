// Package audit is the reader's side of the audit library: the memory through which it tells of calls of the driver, the
// environment that has a program load it, and what can be said of a program that will not. The library itself is in the
// folder audit.
//
//   - ring.go: the ring in shared memory, of which audit/ring.h is the other description. Linux only.
//   - program.go: programs that the dynamic linker does not start, or starts without auditing.
//   - symbols.go: names for addresses in stacks.
package audit

import "errors"

// Library is the file name of the audit library.
const Library = "libcistern_audit.so"

// Variable of the environment that tells the library where the ring is.
const Variable = "CISTERN_AUDIT"

// ErrNotLinux is what tracing ends with elsewhere.
var ErrNotLinux = errors.New("programs are traced on Linux on x86-64 only")

// Kinds of records, as in ring.h.
const (
	RecordCall    = 1 // a call of the driver
	RecordProcess = 2 // a process loaded the driver, or was forked by one that had: Text is its program, Handle its parent
	RecordModule  = 3 // an object of a process: Text is its file, Addr what its addresses count from, Handle and Size its code
	RecordUnknown = 4 // a way to a function that could not be followed: Text is its name
)

// MaxPayload is the bytes of a record's frames or text.
const MaxPayload = 144

// Record is one slot of the ring.
type Record struct {
	TimeNS, TookNS                          uint64
	Addr, Size, Stream, Handle, Pool, Extra uint64
	PID, TID                                uint32
	Device, Result                          int32
	Type, Call                              uint8
	Count                                   uint16 // of frames, or bytes of text
	Flags                                   uint32
	payload                                 [MaxPayload / 8]uint64
	_                                       uint64
}

// Frames are the addresses of a call's stack, innermost first. They last as long as the record.
func (r *Record) Frames() []uint64 { return r.payload[:min(int(r.Count), len(r.payload))] }

// Text of a record that is no call.
func (r *Record) Text() string {
	n := min(int(r.Count), MaxPayload)
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.payload[i/8] >> (i % 8 * 8))
	}
	return string(b)
}
