package symbols

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"slices"
)

// Tables name addresses in files, of which each is read once. The zero value is ready.
type Tables struct {
	files map[string]*functions
}

// functions are those of a file, by address, with the file's table of names.
type functions struct {
	list  []function
	names []byte
}

type function struct {
	from uint64
	symbol
}

// mostSymbols and mostNames bound the tables of a file, in bytes: larger ones belong to libraries whose functions are named
// by offset.
const (
	mostSymbols = 64 << 20
	mostNames   = 512 << 20
)

// Name is the function of a file that an address is in, as the file's symbols count, or the offset in the file where there is
// no name.
func (t *Tables) Name(file string, at uint64) string {
	if t.files == nil {
		t.files = map[string]*functions{}
	}
	f := t.files[file]
	if f == nil {
		f = read(file)
		t.files[file] = f
	}
	i, exact := slices.BinarySearchFunc(f.list, at, func(f function, at uint64) int { return cmp.Compare(f.from, at) })
	if !exact {
		i--
	}
	if i >= 0 && at-f.list[i].from < f.list[i].size {
		if name := f.name(f.list[i].name); name != "" {
			return name
		}
	}
	return fmt.Sprintf("%s+%#x", filepath.Base(file), at)
}

func (f *functions) name(at uint32) string {
	if uint64(at) >= uint64(len(f.names)) {
		return ""
	}
	b := f.names[at:]
	b, _, _ = bytes.Cut(b[:min(len(b), longest)], []byte{0})
	return string(b)
}

// read reads a file that can be opened.
func read(name string) *functions {
	f, err := open(name)
	if err != nil {
		return &functions{}
	}
	defer f.Close()
	return f.functions()
}

// functions are those of the first table that has some.
func (f file) functions() *functions {
	out := &functions{}
	for _, t := range f.tables() {
		if t.symbols.Size > mostSymbols || t.names.Size > mostNames || t.names.ReaderAt == nil {
			continue
		}
		t.each(func(from uint64, s symbol) { out.list = append(out.list, function{from, s}) })
		if len(out.list) == 0 {
			continue
		}
		// Of several names for a place the one that others can see.
		slices.SortFunc(out.list, func(a, b function) int {
			if a.from != b.from || a.global == b.global {
				return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.size, b.size))
			}
			if a.global {
				return -1
			}
			return 1
		})
		out.list = slices.CompactFunc(out.list, func(a, b function) bool { return a.from == b.from })
		out.names, _ = io.ReadAll(io.NewSectionReader(t.names, 0, int64(t.names.Size)))
		return out
	}
	return out
}
