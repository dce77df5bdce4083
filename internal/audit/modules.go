package audit

import (
	"cmp"
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

// mostModules bounds what is kept of a process that never ends to tell of others.
const mostModules = 1 << 14

// Add puts in a module, in the place of those that were where it is.
func (m *Modules) Add(n Module) {
	list := slices.DeleteFunc(*m, func(o Module) bool { return o.From < n.To && n.From < o.To })
	if len(list) < mostModules {
		i, _ := slices.BinarySearchFunc(list, n.From, func(o Module, at uint64) int { return cmp.Compare(o.From, at) })
		list = slices.Insert(list, i, n)
	}
	*m = list
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
