//go:build !linux || !cgo

package nvml

import (
	"context"
	"errors"
)

var errUnsupported = errors.New("NVIDIA's management library (NVML) is not reached: this program was built without it (it needs Linux and cgo)")

// Library is NVML, which this program was built without.
type Library struct{}

// Open fails: NVML is reached on Linux, in a program built with cgo.
func Open(context.Context, string) (*Library, error) { return nil, errUnsupported }

// Driver fails as Open does.
func (*Library) Driver(context.Context) (string, error) { return "", errUnsupported }

// Devices fails as Open does.
func (*Library) Devices(context.Context) ([]Device, error) { return nil, errUnsupported }

// Close does nothing.
func (*Library) Close() error { return nil }

// Neighbours fails as Open does.
func Neighbours(context.Context, [16]byte) ([]Process, error) { return nil, errUnsupported }
