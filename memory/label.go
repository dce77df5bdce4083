package memory

// A tag is a number that a request carries and its block keeps until it is freed. A library is a number for the library
// that asked. The program decides what both mean; 0 is none.
const (
	MaxTag     = 1<<16 - 1 // the largest tag
	MaxLibrary = 255       // the largest number of a library
)
