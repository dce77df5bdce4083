//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"sync"
	"sync/atomic"
)

// labels numbers names, from 1: what blocks carry is a number. A name stays for the life of the process, as C code keeps
// pointers to it.
type labels struct {
	most   int // names
	mu     sync.Mutex
	number map[string]uint32         // +checklocks:mu
	names  atomic.Pointer[[]*C.char] // by number - 1; replaced under mu, read without
}

// of is the number of a name, which it gets if it has none; 0 if there are no more.
func (l *labels) of(text string) uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n, ok := l.number[text]; ok {
		return n
	}
	var names []*C.char
	if old := l.names.Load(); old != nil {
		names = *old
	}
	if len(names) >= l.most {
		return 0
	}
	names = append(names, C.CString(text)) // readers see a length, so what they see never changes
	l.names.Store(&names)
	if l.number == nil {
		l.number = map[string]uint32{}
	}
	l.number[text] = uint32(len(names))
	return uint32(len(names))
}

// known is the number of a name, 0 if it has none.
func (l *labels) known(text string) uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.number[text]
}

// name is the C string of a number's name, nil where there is none.
func (l *labels) name(n uint32) *C.char {
	names := l.names.Load()
	if names == nil || n == 0 || int(n) > len(*names) {
		return nil
	}
	return (*names)[n-1]
}
