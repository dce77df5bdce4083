package nvidia

// CaptureMode is how strictly a capture forbids unsafe calls (CUstreamCaptureMode).
type CaptureMode int

const (
	CaptureGlobal      CaptureMode = 0 // in every thread
	CaptureThreadLocal CaptureMode = 1 // in the capturing thread
	CaptureRelaxed     CaptureMode = 2 // nowhere
)
