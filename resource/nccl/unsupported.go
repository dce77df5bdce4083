//go:build !linux || !cgo

package nccl

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
)

type library struct{}

func load(string) (*library, error) {
	return nil, errors.New("nccl: this program was built without NCCL (it needs Linux and cgo)")
}

func (l *library) alloc(uint64) (cuda.Ptr, int) { return 0, unhandledCUDA }

func (l *library) free(cuda.Ptr) int { return unhandledCUDA }

func (l *library) words(int) string { return "no NCCL" }
