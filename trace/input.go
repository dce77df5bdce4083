package trace

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// windowSize is how much of the decompressed file a reader sees at once.
const windowSize = 256 << 10

// input is a file's decompressed bytes behind a window: buf[pos:end] is what can be looked at now. Decompression runs
// in a goroutine of its own, one window ahead. An input belongs to one goroutine.
type input struct {
	buf      []byte
	pos, end int
	base     int64 // offset of buf[0] in the decompressed file
	src      io.Reader
	eof      bool
	err      error // why src ended, where that was not the end of the file
	close    func(wait bool)
	raw      *counter // the file as it is stored
}

var (
	gzipMagic = []byte{0x1f, 0x8b}
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
)

// newInput recognises compression by content.
func newInput(r io.Reader) (*input, error) {
	raw := &counter{r: r}
	br := bufio.NewReaderSize(raw, 64<<10)
	head, err := br.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	in := &input{buf: make([]byte, windowSize), src: br, close: func(bool) {}, raw: raw}
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

// offset is the position in the decompressed file.
func (in *input) offset() int64 { return in.base + int64(in.pos) }

// stored is how much of the file as it is stored was read, which is ahead of what was decompressed.
func (in *input) stored() int64 { return in.raw.n.Load() }

// need makes n bytes visible, n at most windowSize, and says whether the file has them.
func (in *input) need(n int) bool {
	for in.end-in.pos < n {
		if in.eof {
			return false
		}
		if in.pos > 0 {
			copy(in.buf, in.buf[in.pos:in.end])
			in.base += int64(in.pos)
			in.end -= in.pos
			in.pos = 0
		}
		k, err := in.src.Read(in.buf[in.end:])
		in.end += k
		if err != nil {
			in.eof = true
			if !errors.Is(err, io.EOF) {
				in.err = err
			}
		}
	}
	return true
}

// truncated is the error for a file that ends inside what.
func (in *input) truncated(what string) error {
	off := in.base + int64(in.end)
	if in.err != nil {
		e := atByte(off, "%s", in.err)
		e.Err = in.err
		return e
	}
	return atByte(off, "the file ends inside %s", what)
}

// ended checks that nothing follows, and so that what compressed the file agrees that it is whole.
func (in *input) ended(what string) error {
	if in.need(1) {
		return atByte(in.offset(), "data after %s", what)
	}
	if in.err != nil {
		return in.truncated(what)
	}
	return nil
}

// skip passes over n bytes.
func (in *input) skip(n uint64) bool {
	for n > 0 {
		if in.pos == in.end && !in.need(1) {
			return false
		}
		k := min(n, uint64(in.end-in.pos))
		in.pos += int(k)
		n -= k
	}
	return true
}

// Read makes input an io.Reader, for the formats that are not read through the window.
func (in *input) Read(p []byte) (int, error) {
	if !in.need(1) {
		if in.err != nil {
			return 0, in.err
		}
		return 0, io.EOF
	}
	n := copy(p, in.buf[in.pos:in.end])
	in.pos += n
	return n, nil
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
	if l.n > ratioFree && l.n > ratioMax*l.raw.n.Load() {
		return n, fmt.Errorf("%s: decompresses to more than %d times its size", l.what, ratioMax)
	}
	if err != nil && !errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("%s: %w", l.what, err)
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

// stop ends the goroutine once its current read returns, and waits for that if it is told to.
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
