// Package input is what the readers of all formats begin with: the bytes of a file, unpacked a window ahead (input.go),
// the bounds on what a file can make a reader hold (budget.go), and errors that say where in it they are. Memory and time
// follow the size of the file, whatever it claims.
package input

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// WindowSize is how much of the decompressed file a reader sees at once.
const WindowSize = 256 << 10

// Input is a file's decompressed bytes behind a window: Buf[Pos:End] is what can be looked at now. Decompression runs
// in a goroutine of its own, one window ahead. An Input belongs to one goroutine.
type Input struct {
	Buf      []byte
	Pos, End int
	EOF      bool  // what is in Buf is the last of the file
	Err      error // why there is no more, where that is not the file's end
	base     int64 // offset of Buf[0] in the decompressed file
	src      io.Reader
	close    func(wait bool)
	raw      *counter // the file as it is stored
}

var (
	gzipMagic = []byte{0x1f, 0x8b}
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
)

// New reads r, which may be compressed: that is recognised by its content.
func New(r io.Reader) (*Input, error) {
	raw := &counter{r: r}
	br := bufio.NewReaderSize(raw, 64<<10)
	head, err := br.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	in := &Input{Buf: make([]byte, WindowSize), src: br, close: func(bool) {}, raw: raw}
	switch {
	case bytes.HasPrefix(head, gzipMagic):
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, fmt.Errorf("gzip: %w", noEOF(err))
		}
		a := newAhead(&ratioLimit{r: z, raw: raw, what: "gzip"}, func() {})
		in.src, in.close = a, a.stop
	case bytes.HasPrefix(head, zstdMagic):
		// One decoder goroutine's worth of memory: windows above 64 MiB are refused.
		z, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(64<<20),
			zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, fmt.Errorf("zstd: %w", noEOF(err))
		}
		a := newAhead(&ratioLimit{r: z, raw: raw, what: "zstd"}, z.Close)
		in.src, in.close = a, a.stop
	}
	return in, nil
}

// Offset is the position in the decompressed file.
func (in *Input) Offset() int64 { return in.base + int64(in.Pos) }

// Stored is how much of the file as it is stored was read, which is ahead of what was decompressed.
func (in *Input) Stored() int64 { return in.raw.n.Load() }

// Need makes n bytes visible, n at most WindowSize, and says whether the file has them.
func (in *Input) Need(n int) bool {
	for in.End-in.Pos < n {
		if in.EOF {
			return false
		}
		if in.Pos > 0 {
			copy(in.Buf, in.Buf[in.Pos:in.End])
			in.base += int64(in.Pos)
			in.End -= in.Pos
			in.Pos = 0
		}
		k, err := in.src.Read(in.Buf[in.End:])
		in.End += k
		if err != nil {
			in.EOF = true
			if !errors.Is(err, io.EOF) {
				in.Err = err
			}
		}
	}
	return true
}

// Truncated is the error for a file that ends inside what.
func (in *Input) Truncated(what string) error {
	off := in.base + int64(in.End)
	if in.Err != nil {
		e := AtByte(off, "%s", in.Err)
		e.Err = in.Err
		return e
	}
	return AtByte(off, "the file ends inside %s", what)
}

// Ended checks that nothing follows, and so that what compressed the file agrees that it is whole.
func (in *Input) Ended(what string) error {
	if in.Need(1) {
		return AtByte(in.Offset(), "data after %s", what)
	}
	if in.Err != nil {
		return in.Truncated(what)
	}
	return nil
}

// Skip passes over n bytes.
func (in *Input) Skip(n uint64) bool {
	for n > 0 {
		if in.Pos == in.End && !in.Need(1) {
			return false
		}
		k := min(n, uint64(in.End-in.Pos))
		in.Pos += int(k)
		n -= k
	}
	return true
}

// Read makes input an io.Reader, for the formats that are not read through the window.
func (in *Input) Read(p []byte) (int, error) {
	if !in.Need(1) {
		if in.Err != nil {
			return 0, in.Err
		}
		return 0, io.EOF
	}
	n := copy(p, in.Buf[in.Pos:in.End])
	in.Pos += n
	return n, nil
}

// Peek is the next n bytes, or as many as there are, which stay unread.
func (in *Input) Peek(n int) []byte {
	in.Need(n)
	return in.Buf[in.Pos:min(in.End, in.Pos+n)]
}

// Pipe is a source that may stay open without bytes to read: what is wrong with its beginning is reported at once, and
// it may be read on after that.
type Pipe struct{ io.Reader }

// File reads a file by read, which takes it unpacked, and names it in errors. r may be an Input: of a file
// whose format was recognised by reading it.
func File(r io.Reader, path string, read func(in *Input) (*recording.File, error)) (*recording.File, error) {
	in, ok := r.(*Input)
	if !ok {
		var err error
		if in, err = New(r); err != nil {
			return nil, Named(err, path)
		}
		_, pipe := r.(Pipe)
		defer in.close(!pipe)
	}
	f, err := read(in)
	if err != nil {
		return nil, Named(err, path)
	}
	f.Path, f.DecodedBytes = path, in.Offset()
	for _, t := range f.Traces {
		t.StoredBytes = in.Stored()
	}
	return f, nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// counter counts the bytes of the file as it is stored.
type counter struct {
	r io.Reader
	n atomic.Int64 // the decompressor's goroutine counts
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// ratioLimit refuses to go on decompressing what grows beyond reason.
type ratioLimit struct {
	r    io.Reader
	raw  *counter
	what string
	n    int64
}

func (l *ratioLimit) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	l.n += int64(n)
	if l.n > RatioFree && l.n > RatioMax*l.raw.n.Load() {
		return n, fmt.Errorf("%s: decompresses to more than %d times its size", l.what, RatioMax)
	}
	if err != nil && !errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		cut := ""
		if errors.Is(err, io.ErrUnexpectedEOF) {
			cut = " (the file is cut off)"
		}
		err = fmt.Errorf("%s: %w%s", l.what, err, cut)
	}
	return n, err
}

// ahead reads its source one piece ahead, in a goroutine that ends with the source or with stop.
type ahead struct {
	full chan piece
	free chan []byte
	quit chan struct{}
	done chan struct{}
	once sync.Once
	cur  []byte // unread rest of held
	held []byte // goes back to free when cur is empty
	err  error
}

type piece struct {
	b   []byte
	err error
}

// newAhead reads r; done is called when it is not read any more.
func newAhead(r io.Reader, done func()) *ahead {
	const pieces, size = 3, 256 << 10
	a := &ahead{full: make(chan piece, pieces), free: make(chan []byte, pieces),
		quit: make(chan struct{}), done: make(chan struct{})}
	for range pieces {
		a.free <- make([]byte, size)
	}
	go func() {
		defer close(a.done)
		defer done()
		for {
			var b []byte
			select {
			case b = <-a.free:
			case <-a.quit:
				return
			}
			n, err := r.Read(b[:size])
			for n == 0 && err == nil {
				n, err = r.Read(b[:size])
			}
			select {
			case a.full <- piece{b[:n], err}:
			case <-a.quit:
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return a
}

// stop ends the goroutine once its current read returns, and waits for that if asked to.
func (a *ahead) stop(wait bool) {
	a.once.Do(func() { close(a.quit) })
	if wait {
		<-a.done
	}
}

func (a *ahead) Read(p []byte) (int, error) {
	for len(a.cur) == 0 {
		if a.held != nil {
			a.free <- a.held[:cap(a.held)]
			a.held = nil
		}
		if a.err != nil {
			return 0, a.err
		}
		piece := <-a.full
		a.cur, a.held, a.err = piece.b, piece.b, piece.err
	}
	n := copy(p, a.cur)
	a.cur = a.cur[n:]
	return n, nil
}
