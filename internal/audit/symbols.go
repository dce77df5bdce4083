package audit

import (
	"cmp"
	"debug/elf"
	"fmt"
	"path/filepath"
	"slices"
)

// Module is an object that a process has loaded.
type Module struct {
	File     string
	Base     uint64 // what its addresses count from
	From, To uint64 // its code
	Python   bool   // it is Python's interpreter
}

// Modules are those of a process, by address.
type Modules []Module

// Add puts in a module, in the place of those that were where it is.
func (m *Modules) Add(n Module) {
	list := slices.DeleteFunc(*m, func(o Module) bool { return o.From < n.To && n.From < o.To })
	i, _ := slices.BinarySearchFunc(list, n.From, func(o Module, at uint64) int { return cmp.Compare(o.From, at) })
	*m = slices.Insert(list, i, n)
}

// Find is the module with code at an address.
func (m Modules) Find(addr uint64) (Module, bool) {
	i, exact := slices.BinarySearchFunc(m, addr, func(o Module, at uint64) int { return cmp.Compare(o.From, at) })
	if !exact {
		i--
	}
	if i < 0 || addr >= m[i].To {
		return Module{}, false
	}
	return m[i], true
}

// Symbols finds the names of functions, from the tables of the files themselves, which it reads once each.
type Symbols struct {
	files map[string][]function
}

type function struct {
	from, to uint64
	name     string
}

// mostSymbols bounds the table of a file, in bytes: larger ones belong to libraries whose functions are named by offset.
const mostSymbols = 64 << 20

// Name is the function of a module that an address is in, or the offset in the module where there is no name.
func (s *Symbols) Name(m Module, addr uint64) string {
	if s.files == nil {
		s.files = map[string][]function{}
	}
	list, known := s.files[m.File]
	if !known {
		list = functions(m.File)
		s.files[m.File] = list
	}
	at := addr - m.Base
	i, exact := slices.BinarySearchFunc(list, at, func(f function, at uint64) int { return cmp.Compare(f.from, at) })
	if !exact {
		i--
	}
	if i >= 0 && at < list[i].to {
		return list[i].name
	}
	return fmt.Sprintf("%s+%#x", filepath.Base(m.File), at)
}

func functions(file string) []function {
	f, err := elf.Open(file)
	if err != nil {
		return nil
	}
	defer f.Close()
	var symbols []elf.Symbol
	for _, typ := range []elf.SectionType{elf.SHT_SYMTAB, elf.SHT_DYNSYM} {
		sec := f.SectionByType(typ)
		if sec == nil || sec.Size > mostSymbols {
			continue
		}
		if typ == elf.SHT_SYMTAB {
			symbols, err = f.Symbols()
		} else {
			symbols, err = f.DynamicSymbols()
		}
		if err == nil && len(symbols) > 0 {
			break
		}
	}
	var out []function
	for _, s := range symbols {
		if elf.ST_TYPE(s.Info) == elf.STT_FUNC && s.Size > 0 && s.Section != elf.SHN_UNDEF {
			out = append(out, function{s.Value, s.Value + s.Size, s.Name})
		}
	}
	slices.SortFunc(out, func(a, b function) int { return cmp.Compare(a.from, b.from) })
	return out
}
