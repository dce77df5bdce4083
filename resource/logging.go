package resource

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// LogHeader is the first line of a log.
const LogHeader = "Thread,Time,Action,Pointer,Size,Stream"

// LoggingAdaptor writes a row for each call that passes through it, in the format of RMM's logging_resource_adaptor:
//
//	Thread,Time,Action,Pointer,Size,Stream
//	19165,07:34:49.947326,allocate,0x7f8a00000000,1024,0x1
//
// Actions are allocate, free, and "allocate failure", whose pointer is (nil). The time is the local time of day. An
// allocation is written after it happened and a free before, so that the rows of one address are in order; a free that
// fails is followed by an allocate, as the memory is still there.
type LoggingAdaptor struct {
	adaptor
	mu  sync.Mutex
	w   io.Writer
	now func() time.Time
	buf []byte
	// +checklocks:mu
	first error // that ended the log
}

// Logging makes that adaptor, and writes the header. Each row is one Write. Once a Write fails nothing more is written,
// memory is handed out all the same, and Close says what failed. Close closes w where it is an io.Closer.
func Logging(up Resource, w io.Writer) *LoggingAdaptor {
	l := &LoggingAdaptor{adaptor: adaptor{up}, w: w, now: time.Now}
	l.write([]byte(LogHeader + "\n")) // +checklocksignore: no other goroutine has it
	return l
}

// +checklocks:l.mu
func (l *LoggingAdaptor) write(line []byte) {
	if l.first == nil {
		_, l.first = l.w.Write(line)
	}
}

func (l *LoggingAdaptor) row(action string, p cuda.Ptr, size uint64, st cuda.Stream) {
	thread := threadID()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf = fmt.Appendf(l.buf[:0], "%d,", thread)
	l.buf = l.now().AppendFormat(l.buf, "15:04:05.000000")
	pointer := "(nil)" // as printf writes it
	if p != 0 {
		pointer = fmt.Sprintf("%#x", uint64(p))
	}
	l.buf = fmt.Appendf(l.buf, ",%s,%s,%d,0x%x\n", action, pointer, size, uint64(st))
	l.write(l.buf)
}

func (l *LoggingAdaptor) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	p, err := l.up.Alloc(size, align, st)
	if err != nil {
		l.row("allocate failure", 0, size, st)
		return 0, err
	}
	l.row("allocate", p, size, st)
	return p, nil
}

func (l *LoggingAdaptor) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	l.row("free", p, size, st)
	err := l.up.Free(p, size, align, st)
	if err != nil {
		l.row("allocate", p, size, st)
	}
	return err
}

// Close ends the log and reports what kept rows from being written.
func (l *LoggingAdaptor) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.first
	if errors.Is(err, errLogEnded) {
		return nil
	}
	l.first = errLogEnded
	if c, ok := l.w.(io.Closer); ok {
		err = both(err, c.Close())
	}
	return err
}

var errLogEnded = errors.New("the log was closed")

func (l *LoggingAdaptor) Equal(other Resource) bool { return sameResource(l, other) }
