package pytorch

import (
	"math"
	"unsafe"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/recording/internal/input"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
)

// Labels of a snapshot's entries and blocks. PyTorch writes user_metadata, a string that the program sets
// (torch.cuda.memory._set_memory_metadata) and that holds until it is changed, and compile_context, the compiled region
// that runs: either is the tag of what is allocated meanwhile. What is freed meanwhile may have any label. Cistern's own
// snapshots have a dict under user_metadata, which PyTorch's viewer shows line by line.

// said is the label that an entry or block has: ids of strings plus 1, or numbers of dicts plus 1; 0 is nothing.
type said struct {
	text, dict, compiled uint32
}

// metadata takes a value under user_metadata. What is neither string nor dict says nothing.
func (s *said) metadata(v value) {
	switch v.k {
	case kStr:
		if v.u != sNothing {
			s.text = uint32(v.u) + 1
		}
	case kLabel:
		s.dict = uint32(v.u) + 1
	}
}

// context takes a value under compile_context.
func (s *said) context(v value) {
	if v.k == kStr && v.u != sNothing && v.u != sNotAvailable {
		s.compiled = uint32(v.u) + 1
	}
}

// rawLabel is a dict of user_metadata: ids of strings plus 1.
type rawLabel struct {
	tag, library, name uint32
	thread             uint32
}

func (m *machine) openLabel() error {
	var err error
	if m.labels, err = input.Grow(m.b, m.labels, 16); err != nil {
		return err
	}
	m.labels = append(m.labels, rawLabel{})
	return m.push(value{kLabel, uint64(len(m.labels) - 1)})
}

// set takes an entry of the dict. Others may write one too: what it has of its own is passed over.
func (l *rawLabel) set(key uint64, v value) error {
	text := func(to *uint32) {
		if v.k == kStr && v.u != sNothing {
			*to = uint32(v.u) + 1
		}
	}
	switch key {
	case sTag:
		text(&l.tag)
	case sLibrary:
		text(&l.library)
	case sThreadName:
		text(&l.name)
	case sThread:
		if v.k == kInt && v.u <= math.MaxUint32 {
			l.thread = uint32(v.u)
		}
	}
	return nil
}

// labelNames are the names that one device's labels have.
type labelNames struct {
	tags      nameList
	libraries nameList
	threads   map[uint32]string
	lost      int // labels that there was no number left for
}

// nameList numbers names from 1 by the id of their text. Nil where there are none.
type nameList struct {
	names []string
	ids   map[uint64]int
}

// id is the number of a name; 0 where there are more than limit. key stands for it.
func (l *nameList) id(b *input.Budget, key uint64, limit int, text func() string) (int, error) {
	n, ok := l.ids[key]
	if ok || len(l.names) > limit {
		return n, nil
	}
	s := text()
	if err := b.Take(int64(len(s)) + tables.NameSize); err != nil {
		return 0, err
	}
	if l.ids == nil {
		l.ids, l.names = map[uint64]int{}, []string{""}
	}
	n = len(l.names)
	l.ids[key] = n
	l.names = append(l.names, s)
	return n, nil
}

// compiledPrefix makes a tag of a compile_context.
const compiledPrefix = "torch.compile "

// labelOf is the label that something on a device has. asked is false for what was not asked for by the code that set
// user_metadata: then only a dict counts, which is about the entry itself.
func (m *machine) labelOf(d *rawTrace, s said, asked bool) (tables.Label, error) {
	var tag, library, name uint32
	var l tables.Label
	if s.dict != 0 {
		x := &m.labels[s.dict-1]
		tag, library, name, l.Thread = x.tag, x.library, x.name, x.thread
	} else if asked {
		tag = s.text
	}
	names := &d.names
	str := func(id uint32) string { return text.Clean(string(m.strs.get(uint64(id - 1)))) }
	number := func(list *nameList, limit int, key uint64, text func() string) (int, error) {
		n, err := list.id(m.b, key, limit, text)
		if n == 0 && err == nil {
			names.lost++
		}
		return n, err
	}
	var n int
	var err error
	switch {
	case tag != 0:
		n, err = number(&names.tags, math.MaxUint16, uint64(tag), func() string { return str(tag) })
	case s.compiled != 0 && asked:
		n, err = number(&names.tags, math.MaxUint16, uint64(s.compiled)|1<<32, func() string { return compiledPrefix + str(s.compiled) })
	}
	if err != nil {
		return l, err
	}
	l.Tag = uint16(n)
	if library != 0 {
		if n, err = number(&names.libraries, math.MaxUint8, uint64(library), func() string { return str(library) }); err != nil {
			return l, err
		}
		l.Library = uint8(n)
	}
	if _, ok := names.threads[l.Thread]; name != 0 && l.Thread != 0 && !ok {
		text := str(name)
		if err := m.b.Take(int64(len(text)) + tables.NameSize); err != nil {
			return l, err
		}
		if names.threads == nil {
			names.threads = map[uint32]string{}
		}
		names.threads[l.Thread] = text
	}
	return l, nil
}

// labelEvent gives the entry that is complete its label.
func (m *machine) labelEvent(d *rawTrace) error {
	l, err := m.labelOf(d, m.evLabel, m.ev.Kind == event.Alloc || m.ev.Kind == event.OOM)
	m.ev.Tag, m.ev.Library, m.ev.Thread = l.Tag, l.Library, l.Thread
	return err
}

const rawBlockSize = int64(unsafe.Sizeof(rawBlock{}))
