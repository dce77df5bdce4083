//go:build !linux || !(amd64 || arm64)

package sim

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
)

const exportable = cuda.HandleNone // no descriptors that other processes could be passed

func memoryFile([]byte) (int, error) { return -1, errors.ErrUnsupported }

func readFile(int, []byte) bool { return false }

func readHead(int, []byte) bool { return false }

func mapChunk(int, uint64, bool) ([]byte, error) { return nil, errors.ErrUnsupported }

func unmapChunk([]byte) {}

func closeFile(int) {}

func copyFile(int) (int, error) { return -1, errors.ErrUnsupported }
