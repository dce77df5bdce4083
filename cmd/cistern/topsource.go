package main

import (
	"errors"
	"runtime"

	"github.com/cistern-gpu/cistern/internal/top"
)

// openTop is the source of `cistern top`: this machine, where that is possible at all.
func openTop() (top.Source, error) {
	if runtime.GOOS != "linux" {
		return nil, errors.New("top: GPUs and the processes on them are seen on Linux only")
	}
	return top.NewMachine(""), nil
}
