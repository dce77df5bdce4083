package cuda

import (
	"fmt"
	"strings"
)

// Code is a CUresult. It is itself an error, so that errors.Is(err, cuda.ErrOutOfMemory) works on anything that a
// Driver returned.
type Code int

// The codes that Cistern tells apart (cuda.h, enum cudaError_enum).
const (
	Success                     Code = 0
	ErrInvalidValue             Code = 1
	ErrOutOfMemory              Code = 2
	ErrNotInitialized           Code = 3
	ErrDeinitialized            Code = 4
	ErrStubLibrary              Code = 34
	ErrDeviceUnavailable        Code = 46
	ErrNoDevice                 Code = 100
	ErrInvalidDevice            Code = 101
	ErrInvalidContext           Code = 201
	ErrMapFailed                Code = 205
	ErrUnmapFailed              Code = 206
	ErrECCUncorrectable         Code = 214
	ErrPeerAccessUnsupported    Code = 217
	ErrInvalidHandle            Code = 400
	ErrIllegalState             Code = 401
	ErrLossyQuery               Code = 402
	ErrNotFound                 Code = 500
	ErrNotReady                 Code = 600
	ErrIllegalAddress           Code = 700
	ErrLaunchTimeout            Code = 702
	ErrPeerAccessAlreadyEnabled Code = 704
	ErrContextIsDestroyed       Code = 709
	ErrAssert                   Code = 710
	ErrTooManyPeers             Code = 711
	ErrHostAlreadyRegistered    Code = 712
	ErrHostNotRegistered        Code = 713
	ErrHardwareStack            Code = 714
	ErrIllegalInstruction       Code = 715
	ErrMisalignedAddress        Code = 716
	ErrInvalidAddressSpace      Code = 717
	ErrInvalidPC                Code = 718
	ErrLaunchFailed             Code = 719
	ErrNotPermitted             Code = 800
	ErrNotSupported             Code = 801
	ErrSystemDriverMismatch     Code = 803
	ErrStreamCaptureUnsupported Code = 900
	ErrStreamCaptureInvalidated Code = 901
	ErrStreamCaptureMerge       Code = 902
	ErrStreamCaptureUnmatched   Code = 903
	ErrStreamCaptureUnjoined    Code = 904
	ErrStreamCaptureIsolation   Code = 905
	ErrStreamCaptureImplicit    Code = 906
	ErrCapturedEvent            Code = 907
	ErrUnknown                  Code = 999
)

var codeNames = map[Code]string{
	Success:                     "CUDA_SUCCESS",
	ErrInvalidValue:             "CUDA_ERROR_INVALID_VALUE",
	ErrOutOfMemory:              "CUDA_ERROR_OUT_OF_MEMORY",
	ErrNotInitialized:           "CUDA_ERROR_NOT_INITIALIZED",
	ErrDeinitialized:            "CUDA_ERROR_DEINITIALIZED",
	ErrStubLibrary:              "CUDA_ERROR_STUB_LIBRARY",
	ErrDeviceUnavailable:        "CUDA_ERROR_DEVICE_UNAVAILABLE",
	ErrNoDevice:                 "CUDA_ERROR_NO_DEVICE",
	ErrInvalidDevice:            "CUDA_ERROR_INVALID_DEVICE",
	ErrInvalidContext:           "CUDA_ERROR_INVALID_CONTEXT",
	ErrMapFailed:                "CUDA_ERROR_MAP_FAILED",
	ErrUnmapFailed:              "CUDA_ERROR_UNMAP_FAILED",
	ErrECCUncorrectable:         "CUDA_ERROR_ECC_UNCORRECTABLE",
	ErrPeerAccessUnsupported:    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
	ErrInvalidHandle:            "CUDA_ERROR_INVALID_HANDLE",
	ErrIllegalState:             "CUDA_ERROR_ILLEGAL_STATE",
	ErrLossyQuery:               "CUDA_ERROR_LOSSY_QUERY",
	ErrNotFound:                 "CUDA_ERROR_NOT_FOUND",
	ErrNotReady:                 "CUDA_ERROR_NOT_READY",
	ErrIllegalAddress:           "CUDA_ERROR_ILLEGAL_ADDRESS",
	ErrLaunchTimeout:            "CUDA_ERROR_LAUNCH_TIMEOUT",
	ErrPeerAccessAlreadyEnabled: "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
	ErrContextIsDestroyed:       "CUDA_ERROR_CONTEXT_IS_DESTROYED",
	ErrAssert:                   "CUDA_ERROR_ASSERT",
	ErrTooManyPeers:             "CUDA_ERROR_TOO_MANY_PEERS",
	ErrHostAlreadyRegistered:    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
	ErrHostNotRegistered:        "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
	ErrHardwareStack:            "CUDA_ERROR_HARDWARE_STACK_ERROR",
	ErrIllegalInstruction:       "CUDA_ERROR_ILLEGAL_INSTRUCTION",
	ErrMisalignedAddress:        "CUDA_ERROR_MISALIGNED_ADDRESS",
	ErrInvalidAddressSpace:      "CUDA_ERROR_INVALID_ADDRESS_SPACE",
	ErrInvalidPC:                "CUDA_ERROR_INVALID_PC",
	ErrLaunchFailed:             "CUDA_ERROR_LAUNCH_FAILED",
	ErrNotPermitted:             "CUDA_ERROR_NOT_PERMITTED",
	ErrNotSupported:             "CUDA_ERROR_NOT_SUPPORTED",
	ErrSystemDriverMismatch:     "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
	ErrStreamCaptureUnsupported: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
	ErrStreamCaptureInvalidated: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
	ErrStreamCaptureMerge:       "CUDA_ERROR_STREAM_CAPTURE_MERGE",
	ErrStreamCaptureUnmatched:   "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
	ErrStreamCaptureUnjoined:    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
	ErrStreamCaptureIsolation:   "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
	ErrStreamCaptureImplicit:    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
	ErrCapturedEvent:            "CUDA_ERROR_CAPTURED_EVENT",
	ErrUnknown:                  "CUDA_ERROR_UNKNOWN",
}

// Error is CUDA's name of the code, or "CUDA error N" for one that this package does not name.
func (c Code) Error() string {
	if s, ok := codeNames[c]; ok {
		return s
	}
	return fmt.Sprintf("CUDA error %d", int(c))
}

// ParseCode is the code with the given CUDA name, with or without "CUDA_ERROR_".
func ParseCode(name string) (Code, bool) {
	for c, s := range codeNames {
		if s == name || strings.TrimPrefix(s, "CUDA_ERROR_") == name {
			return c, true
		}
	}
	return 0, false
}

// Poisons reports whether the error leaves the context unusable: after it, every call of the context fails, and
// freeing memory is bookkeeping only (CUDA driver API: "the context cannot be used, and any operations on it will
// return this error").
func (c Code) Poisons() bool {
	switch c {
	case ErrDeinitialized, ErrECCUncorrectable, ErrIllegalAddress, ErrLaunchTimeout, ErrContextIsDestroyed, ErrAssert,
		ErrHardwareStack, ErrIllegalInstruction, ErrMisalignedAddress, ErrInvalidAddressSpace, ErrInvalidPC,
		ErrLaunchFailed:
		return true
	}
	return false
}

// Error is a driver call that failed. errors.Is sees through it to its Code.
type Error struct {
	Op     string // the driver call, without version suffix: "cuMemCreate"
	Device Device // negative where the call is not about one device
	Size   uint64 // bytes asked for; 0 where the call has no size
	Code   Code
}

func (e *Error) Error() string {
	what := e.Op
	if e.Size != 0 {
		what = fmt.Sprintf("%s of %d bytes", what, e.Size)
	}
	if e.Device >= 0 {
		what = fmt.Sprintf("%s on device %d", what, e.Device)
	}
	return what + ": " + e.Code.Error()
}

func (e *Error) Unwrap() error { return e.Code }
