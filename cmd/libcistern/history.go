//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"

	"github.com/cistern-gpu/cistern"
)

// maxHistory bounds the events of cistern_history, 64 bytes each.
const maxHistory = 1 << 30

//export coreHistory
func coreHistory(d C.int, n C.size_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	if n > maxHistory {
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("a history of %d events: at most %d", uint64(n), maxHistory)})
	}
	var dev *cistern.Device
	if n == 0 {
		dev, err = l.idle(d)
	} else {
		dev, err = l.device(d)
	}
	if err != nil {
		return fail(err)
	}
	if dev != nil {
		dev.SetHistory(int(n))
	}
	return C.CISTERN_OK
}
