package symbols

import (
	"bufio"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cistern-gpu/cistern/internal/nopoll"
)

// file is an object that is open. What it says of itself is not trusted.
type file struct {
	*elf.File
	io.Closer
}

func (f file) Close() error { return f.Closer.Close() }

// open opens an object of 64 bits. What else may have the name, such as a pipe, is not waited for.
func open(name string) (file, error) {
	st, err := os.Stat(name)
	if err != nil {
		return file{}, err
	}
	if !st.Mode().IsRegular() {
		return file{}, errors.New(name + " is not a file")
	}
	mapped, err := nopoll.Open(name)
	if err != nil {
		return file{}, err
	}
	f, err := parse(mapped)
	if err != nil {
		mapped.Close()
		return file{}, fmt.Errorf("%s: %w", name, err)
	}
	return file{f, mapped}, nil
}

// parse reads the heads of an object.
func parse(r io.ReaderAt) (*elf.File, error) {
	f, err := elf.NewFile(r)
	if err == nil && (f.Class != elf.ELFCLASS64 || f.Data != elf.ELFDATA2LSB) {
		err = errors.New("it is of another kind of machine")
	}
	return f, err
}

// table is a table of symbols and that of their names.
type table struct{ symbols, names *elf.Section }

// tables are those of a file: what is stripped keeps the names of what it shows to others.
func (f file) tables() (out []table) {
	for _, typ := range []elf.SectionType{elf.SHT_SYMTAB, elf.SHT_DYNSYM} {
		t := f.SectionByType(typ)
		if t != nil && t.ReaderAt != nil && int(t.Link) < len(f.Sections) {
			out = append(out, table{t, f.Sections[t.Link]})
		}
	}
	return out
}

// symbol is what is known of a function: 0 bytes where there is none.
type symbol struct {
	name   uint32 // where it is in the table of names
	size   uint64
	global bool
}

const entryBytes = 24 // Elf64_Sym

// each reads a table through and calls f with every function that has a size.
func (t table) each(f func(from uint64, s symbol)) {
	in := bufio.NewReaderSize(io.NewSectionReader(t.symbols, 0, int64(t.symbols.Size)), 1<<16)
	for {
		b, err := in.Peek(entryBytes)
		if err != nil {
			return
		}
		typ, section := elf.ST_TYPE(b[4]), elf.SectionIndex(binary.LittleEndian.Uint16(b[6:]))
		from := binary.LittleEndian.Uint64(b[8:])
		s := symbol{binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint64(b[16:]), elf.ST_BIND(b[4]) == elf.STB_GLOBAL}
		in.Discard(entryBytes)
		if (typ == elf.STT_FUNC || typ == elf.STT_GNU_IFUNC) && s.size != 0 && section != elf.SHN_UNDEF {
			f(from, s)
		}
	}
}
