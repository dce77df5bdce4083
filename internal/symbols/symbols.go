// Package symbols names the functions that addresses lie in, from the symbol tables of the files that are mapped there.
//
// Own is for a process that names many addresses of its own at once, and seldom: nothing of a table is kept, which for the
// libraries of a program that computes may be a million names, so a table is read through once for all addresses
// in its file. Tables (tables.go) are for naming addresses of other processes one by one: they keep what they read.
package symbols

import (
	"bufio"
	"bytes"
	"cmp"
	"debug/elf"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/internal/nopoll"
)

// Place is where an address lies.
type Place struct {
	File string // the file that is mapped there; "" where none is
	// Func is the name of the function, as the file has it (of C++ mangled); where it has none the name of the file and
	// the offset from where it is loaded, and where there is no file the address.
	Func string
}

// mapping is a range of addresses that holds code of a file.
type mapping struct {
	from, to uint64
	offset   uint64 // of the first byte, in the file
	file     string
	base     uint64 // where the file's first byte is mapped
}

// Own names addresses of this process. Those that a function returns to are behind the call, and may be behind the
// function's last byte: give the byte before.
func Own(addrs []uint64) []Place {
	text, err := nopoll.ReadFile("/proc/self/maps")
	if err != nil {
		text = nil
	}
	return named(mappings(text), addrs)
}

// mappings reads the text of /proc/PID/maps: what holds code of a file, by address.
func mappings(text []byte) []mapping {
	var out []mapping
	base := map[string]uint64{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<16)
	for lines.Scan() {
		// from-to rwxp offset device inode   /path with spaces
		f := strings.SplitN(lines.Text(), " ", 6)
		if len(f) < 6 {
			continue
		}
		a, b, _ := strings.Cut(f[0], "-")
		from, err1 := strconv.ParseUint(a, 16, 64)
		to, err2 := strconv.ParseUint(b, 16, 64)
		offset, err3 := strconv.ParseUint(f[2], 16, 64)
		file := strings.TrimLeft(f[5], " ")
		if err := cmp.Or(err1, err2, err3); err != nil || !strings.HasPrefix(file, "/") && file != "[vdso]" {
			continue
		}
		if _, known := base[file]; !known || offset == 0 {
			base[file] = from - min(from, offset) // of the last copy, where a file is loaded more than once
		}
		if strings.Contains(f[1], "x") {
			out = append(out, mapping{from, to, offset, file, base[file]})
		}
	}
	return out
}

// named names addresses, with the tables of the files that they lie in.
func named(maps []mapping, addrs []uint64) []Place {
	out := make([]Place, len(addrs))
	byFile := map[string][]wanted{}
	for i, addr := range addrs {
		at, exact := slices.BinarySearchFunc(maps, addr, func(m mapping, a uint64) int { return cmp.Compare(m.from, a) })
		if !exact {
			at--
		}
		if at < 0 || addr >= maps[at].to {
			out[i].Func = fmt.Sprintf("%#x", addr)
			continue
		}
		m := &maps[at]
		out[i] = Place{m.file, fmt.Sprintf("%s+%#x", filepath.Base(strings.TrimSuffix(m.file, deleted)), addr-m.base)}
		byFile[m.file] = append(byFile[m.file], wanted{offset: addr - m.from + m.offset, to: &out[i].Func})
	}
	for file, list := range byFile {
		if !strings.HasSuffix(file, deleted) { // what has its name now is another file
			nameAll(file, list)
		}
	}
	return out
}

// deleted is what the kernel puts behind the name of a file that is gone.
const deleted = " (deleted)"

// wanted is an address in a file whose function's name is to be written to a place.
type wanted struct {
	offset uint64 // in the file
	at     uint64 // as its symbol table counts
	to     *string
	best   symbol
}

// nameAll names addresses in a file, as many as it has names for.
func nameAll(file string, list []wanted) {
	f, err := open(file)
	if err != nil {
		return
	}
	defer f.Close()
	f.nameAll(list)
}

func (f file) nameAll(list []wanted) {
	var known []wanted
	for _, w := range list {
		for _, p := range f.Progs {
			if p.Type == elf.PT_LOAD && w.offset >= p.Off && w.offset-p.Off < p.Filesz {
				w.at = w.offset - p.Off + p.Vaddr
				known = append(known, w)
				break
			}
		}
	}
	slices.SortFunc(known, func(a, b wanted) int { return cmp.Compare(a.at, b.at) })
	for _, t := range f.tables() {
		search(t, known)
		for i := range known {
			if w := &known[i]; w.best.size != 0 {
				if name := text(t.names, w.best.name); name != "" {
					*w.to = name
				}
			}
		}
		known = slices.DeleteFunc(known, func(w wanted) bool { return w.best.size != 0 })
	}
}

// search reads a table through and finds for each address, which are sorted, the smallest function around it, and of
// several names for that the one that others can see.
func search(t table, list []wanted) {
	if len(list) == 0 {
		return
	}
	t.each(func(from uint64, s symbol) {
		if from > list[len(list)-1].at || from+s.size <= list[0].at {
			return
		}
		i, _ := slices.BinarySearchFunc(list, from, func(w wanted, at uint64) int { return cmp.Compare(w.at, at) })
		for ; i < len(list) && list[i].at-from < s.size; i++ {
			if now := &list[i].best; now.size == 0 || s.size < now.size || s.size == now.size && s.global && !now.global {
				*now = s
			}
		}
	})
}

// longest is the longest name that is read, in bytes: those of templates are cut.
const longest = 4096

// text is a string of a table.
func text(table *elf.Section, at uint32) string {
	if table.ReaderAt == nil || uint64(at) >= table.Size {
		return ""
	}
	b := make([]byte, min(longest, table.Size-uint64(at)))
	n, _ := table.ReadAt(b, int64(at))
	b, _, _ = bytes.Cut(b[:n], []byte{0})
	return string(b)
}
