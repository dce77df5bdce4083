package audit

// Untraced is a process below a traced program that uses the driver and is not seen.
type Untraced struct {
	PID     int
	Program string // its file, or its name alone where the kernel does not tell that
	Why     string // a sentence's end: "it ..."
}
