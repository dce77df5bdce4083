// Package audit is the reader's side of the audit library: the memory that the library writes calls of the driver to, the
// environment that has a program load it, and the reasons why a program would not. The library itself is in the folder audit.
//
//   - ring_linux.go: the ring in shared memory, of which audit/ring.h is the other description.
//   - pieces.go: records that are longer than a slot: stacks, code objects.
//   - program.go, rights_linux.go: programs that the dynamic linker does not start, or starts without auditing.
//   - modules.go: the objects that a process has loaded, by address.
//   - watch_linux.go, untraced_linux.go: processes below the program that use the driver and are not traced, and why.
//
// Nothing in the ring is trusted: a traced program may write over it.
//
// A process that is not traced leaves nothing in the ring. It is found from outside, in /proc, a few times a second at most. A
// process that was started with what the audit library needs counts as traced. Of the others the mapped files are read, and a
// process is reported once, when the reason can no longer change.
package audit

import "errors"

// Library is the file name of the audit library.
const Library = "libcistern_audit.so"

// Variable of the environment that tells the library where the ring is.
const Variable = "CISTERN_AUDIT"

// RingName is the name of the ring's file in memory, as the kernel shows it among what a process has mapped.
const RingName = "cistern-audit"

// ErrNotLinux is what tracing ends with elsewhere.
var ErrNotLinux = errors.New("programs are traced on Linux on x86-64 and on aarch64 only")

// Kinds of records, as in ring.h.
const (
	RecordCall    = 1 // a call of the driver
	RecordProcess = 2 // a process loaded the driver, or was forked by one that had: Text is its program, Handle its parent, Extra whose memory it has
	RecordModule  = 3 // an object of a process: Text is its file, Addr what its addresses count from, Handle and Size its code
	RecordUnknown = 4 // a way to a function that could not be followed: Text is its name
	RecordStack   = 5 // a stack, by its number Addr: of its words the first Size are return addresses
	RecordCode    = 6 // a code object of Python, by its number Addr, with its first line Size: its text is file, zero, function
	RecordPython  = 7 // the stacks of a process have no frames of Python: Text is why
	RecordEnded   = 8 // Addr is a process that had ended by then
	RecordDevice  = 9 // Device is a process's number of a device, Size its memory: Text is its UUID, 16 bytes, and its name
)

// Flags of records.
const (
	CallStack    = 1 // the call has the number of a stack
	ProcessFresh = 1 // the process has just loaded the driver: nothing of another's memory is in it
	ModulePython = 1 // the module is Python's interpreter
)

// Stacks are the kinds of frames that are recorded.
type Stacks uint32

const (
	Native Stacks = 1 << iota
	Python
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

// Words of a record whose payload is numbers. They last as long as the record.
func (r *Record) Words() []uint64 { return r.payload[:min(int(r.Count), len(r.payload))] }

// Caller is the address from which a call was made.
func (r *Record) Caller() uint64 { return r.payload[0] }

// Stack is the number of a call's stack, of which a record before told; 0 where none is recorded.
func (r *Record) Stack() uint64 {
	if r.Flags&CallStack == 0 {
		return 0
	}
	return r.payload[1]
}

// Text of a record that is one.
func (r *Record) Text() string {
	n := min(int(r.Count), MaxPayload)
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.payload[i/8] >> (i % 8 * 8))
	}
	return string(b)
}
