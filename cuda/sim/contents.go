package sim

import "bytes"

// Poison is what every byte of simulated memory has until it is written: a program that uses undefined memory of
// a GPU sees it.
const Poison = 0xDB

// contentPage is the bytes that are kept as one.
const contentPage = 16 << 10

// contents is the bytes of one chunk, as far as something wrote them: pages by number. A page that is not there is all
// poison. They go with the chunk, and stay while it is mapped elsewhere.
type contents struct {
	pages map[uint64]*[contentPage]byte
}

var poisonPage = func() (p [contentPage]byte) {
	for i := range p {
		p[i] = Poison
	}
	return p
}()

// write copies b to offset off.
func (c *chunk) write(off uint64, b []byte) {
	for len(b) > 0 {
		w, n := c.window(off, uint64(len(b)))
		if w != nil {
			w.file.put(off-w.lo, b[:n])
		} else {
			c.writeOwn(off, b[:n])
		}
		b, off = b[n:], off+n
	}
}

// read copies what is at offset off to b.
func (c *chunk) read(off uint64, b []byte) {
	for len(b) > 0 {
		w, n := c.window(off, uint64(len(b)))
		if w != nil {
			w.file.get(off-w.lo, b[:n])
		} else {
			c.readOwn(off, b[:n])
		}
		b, off = b[n:], off+n
	}
}

// forget makes size bytes at offset off undefined again.
func (c *chunk) forget(off, size uint64) {
	for size > 0 {
		w, n := c.window(off, size)
		if w != nil {
			n = min(n, contentPage)
			w.file.put(off-w.lo, poisonPage[:n])
		} else {
			c.forgetOwn(off, n)
		}
		size, off = size-n, off+n
	}
}

// writeOwn is write where no other driver shares the bytes. Poison written where nothing is kept takes no memory.
func (c *chunk) writeOwn(off uint64, b []byte) {
	if c.file != nil {
		c.file.put(off, b)
		return
	}
	for len(b) > 0 {
		n, at := off/contentPage, off%contentPage
		part := b[:min(uint64(len(b)), contentPage-at)]
		b, off = b[len(part):], off+uint64(len(part))
		var page *[contentPage]byte
		if c.data != nil {
			page = c.data.pages[n]
		}
		if page == nil {
			if bytes.Equal(part, poisonPage[:len(part)]) {
				continue
			}
			page = new([contentPage]byte)
			if len(part) < contentPage {
				*page = poisonPage
			}
			if c.data == nil {
				c.data = &contents{pages: map[uint64]*[contentPage]byte{}}
			}
			c.data.pages[n] = page
		}
		copy(page[at:], part)
	}
}

func (c *chunk) readOwn(off uint64, b []byte) {
	if c.file != nil {
		c.file.get(off, b)
		return
	}
	for len(b) > 0 {
		n, at := off/contentPage, off%contentPage
		part := b[:min(uint64(len(b)), contentPage-at)]
		b, off = b[len(part):], off+uint64(len(part))
		page := &poisonPage
		if c.data != nil {
			if p := c.data.pages[n]; p != nil {
				page = p
			}
		}
		copy(part, page[at:])
	}
}

func (c *chunk) forgetOwn(off, size uint64) {
	if c.file != nil {
		for end := off + size; off < end; off += contentPage {
			c.file.put(off, poisonPage[:min(contentPage, end-off)])
		}
		return
	}
	if c.data == nil {
		return
	}
	for end := off + size; off < end; {
		n, at := off/contentPage, off%contentPage
		part := min(end-off, contentPage-at)
		if part == contentPage {
			delete(c.data.pages, n)
		} else if page := c.data.pages[n]; page != nil {
			copy(page[at:at+part], poisonPage[:])
		}
		off += part
	}
	if len(c.data.pages) == 0 {
		c.data = nil
	}
}
